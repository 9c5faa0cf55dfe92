#include "aten/operator_counts.h"

#include <c10/util/flat_hash_map.h>

#include <mutex>

namespace foo::aten {
namespace {

struct Registry {
  std::mutex mutex;
  // References to elements of a map stay valid.
  std::map<std::string, OperatorCount> counts;
};

// Never destroyed: operators may run after the static objects of this library are gone.
Registry& registry() {
  static auto* instance = new Registry();
  return *instance;
}

// To hash a name, let alone to print it, takes a good part of the time of a small call. So the
// counters are known by the name's address, which may become that of another operator's.
std::atomic<int64_t>& fallback_count(const c10::OperatorName& name) {
  struct Known {
    c10::OperatorName name;
    OperatorCount* count;
  };
  thread_local ska::flat_hash_map<const void*, Known> known;
  const auto position = known.find(&name);
  if (position != known.end() && position->second.name == name) {
    return position->second.count->fallback;
  }
  OperatorCount& count = operator_count(c10::toString(name));
  known.insert_or_assign(&name, Known{name, &count});
  return count.fallback;
}

}  // namespace

OperatorCount& operator_count(const std::string& name) {
  const std::lock_guard<std::mutex> lock(registry().mutex);
  return registry().counts[name];
}

void count_fallback(const c10::OperatorHandle& op) {
  fallback_count(op.operator_name()).fetch_add(1, std::memory_order_relaxed);
}

std::map<std::string, std::pair<int64_t, int64_t>> operator_counts() {
  const std::lock_guard<std::mutex> lock(registry().mutex);
  std::map<std::string, std::pair<int64_t, int64_t>> result;
  for (const auto& [name, count] : registry().counts) {
    const std::pair<int64_t, int64_t> values = {count.own, count.fallback};
    if (values.first + values.second > 0) result[name] = values;
  }
  return result;
}

void reset_operator_counts() {
  const std::lock_guard<std::mutex> lock(registry().mutex);
  for (auto& [name, count] : registry().counts) {
    count.own = 0;
    count.fallback = 0;
  }
}

}  // namespace foo::aten
