#include "aten/operator_counts.h"

#include <mutex>
#include <unordered_map>

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

}  // namespace

OperatorCount& operator_count(const std::string& name) {
  const std::lock_guard<std::mutex> lock(registry().mutex);
  return registry().counts[name];
}

void count_fallback(const c10::OperatorHandle& op) {
  // To print the name takes longer than a small call.
  thread_local std::unordered_map<c10::OperatorName, OperatorCount*> known;
  OperatorCount*& count = known[op.operator_name()];
  if (count == nullptr) count = &operator_count(c10::toString(op.operator_name()));
  count->fallback.fetch_add(1, std::memory_order_relaxed);
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
