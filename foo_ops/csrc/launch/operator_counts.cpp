#include "launch/operator_counts.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>

#include "launch/fork_mutex.h"

namespace foo {
namespace {

// The counter of an operator that is known by its handle.
struct Known {
  c10::OperatorName name;
  OperatorCount* count;
};

struct Registry {
  ForkMutex mutex;
  // References to elements of a map stay valid.
  std::map<std::string, OperatorCount> counts;
  std::map<std::string, Known> known;
};

// Never destroyed: operators may run after the static objects of this library are gone.
Registry& registry() {
  static auto* instance = new Registry();
  return *instance;
}

const Known& find_known(const c10::OperatorName& name) {
  const std::string text = c10::toString(name);
  OperatorCount& count = operator_count(text);
  const std::lock_guard lock(registry().mutex);
  return registry().known.try_emplace(text, Known{name, &count}).first->second;
}

// To hash a name, let alone to print it, takes a good part of the time of a small call. So each
// thread keeps what it has found, near a place that follows from the name's address. An array needs
// no destructor: a thread may run operators until it is gone.
OperatorCount& count_of(const c10::OperatorName& name) {
  constexpr size_t kPlaces = 1024;
  constexpr size_t kTries = 8;
  thread_local std::array<const Known*, kPlaces> places{};
  const size_t first = reinterpret_cast<uintptr_t>(&name) * 0x9E3779B97F4A7C15u >> 32;
  for (size_t place = first; place < first + kTries; ++place) {
    const Known*& known = places[place % kPlaces];
    if (known == nullptr) known = &find_known(name);
    if (known->name == name) return *known->count;
  }
  return *find_known(name).count;
}

}  // namespace

OperatorCount& operator_count(const std::string& name) {
  const std::lock_guard lock(registry().mutex);
  return registry().counts[name];
}

OperatorCount* count_for(c10::DispatchKey key, const std::string& name) {
  return key == c10::DispatchKey::PrivateUse1 ? &operator_count(name) : nullptr;
}

std::atomic<void (*)()> before_first_call = nullptr;

void count_own(const c10::OperatorHandle& op) {
  count_of(op.operator_name()).own.fetch_add(1, std::memory_order_relaxed);
}

void count_fallback(const c10::OperatorHandle& op) {
  count_of(op.operator_name()).fallback.fetch_add(1, std::memory_order_relaxed);
}

std::map<std::string, std::pair<int64_t, int64_t>> operator_counts() {
  const std::lock_guard lock(registry().mutex);
  std::map<std::string, std::pair<int64_t, int64_t>> result;
  for (const auto& [name, count] : registry().counts) {
    const std::pair<int64_t, int64_t> values = {count.own, count.fallback};
    if (values.first + values.second > 0) result[name] = values;
  }
  return result;
}

void reset_operator_counts() {
  const std::lock_guard lock(registry().mutex);
  for (auto& [name, count] : registry().counts) {
    count.own = 0;
    count.fallback = 0;
  }
}

}  // namespace foo
