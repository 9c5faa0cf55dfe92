#include "launch/operator_counts.h"

#include <ATen/core/op_registration/adaption.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>

#include "launch/fork_mutex.h"
#include "launch/parameter.h"
#include "launch/registration.h"

namespace foo {

void check_one_device(const char* operator_name, at::ArrayRef<const at::Tensor*> tensors) {
  const auto first = std::find_if(tensors.begin(), tensors.end(), [](const at::Tensor* tensor) {
    return tensor != nullptr && tensor->device().type() == c10::DeviceType::PrivateUse1;
  });
  if (first == tensors.end()) return;
  const c10::Device expected = (*first)->device();
  for (size_t position = 0; position < tensors.size(); ++position) {
    const at::Tensor* tensor = tensors[position];
    if (tensor == nullptr || tensor->device() == expected) continue;
    const std::string argument = find_operator(operator_name).schema().arguments()[position].name();
    c10::impl::common_device_check_failure(expected, *tensor, operator_name, argument.c_str());
  }
}

namespace {

// Serves all keys of nested tensors that have no kernel of their own, and precedes the composites
// of autograd. Jagged tensors in inference mode look it up, too.
constexpr auto kNestedKey = c10::DispatchKey::CompositeImplicitAutogradNestedTensor;

// Returns the argument that is a nested tensor or a list with one.
std::string nested_argument(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const auto& parameters = op.schema().arguments();
  const auto arguments = torch::jit::last(stack, parameters.size());
  for (size_t i = 0; i < parameters.size(); ++i) {
    bool is_nested = false;
    for_each_tensor(arguments[i],
                    [&](const at::Tensor& tensor) { is_nested |= tensor.is_nested(); });
    if (is_nested) return parameters[i].name();
  }
  return "an argument";
}

[[noreturn]] void refuse(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, short_name(op.operator_name().name), ": ",
                              nested_argument(op, stack),
                              " must be a dense tensor, got a nested one");
}

// Prefers a kernel for nested rows, which tensors in inference mode don't reach by themselves.
void refuse_unless_of_rows(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                           torch::jit::Stack* stack) {
  constexpr auto nested = c10::DispatchKey::AutogradNestedTensor;
  if (!op.hasKernelForDispatchKey(nested)) refuse(op, *stack);
  op.getComputedKernelForDispatchKey(nested).callBoxed(op, keys, stack);
}

// Prefers the author's kernel for autograd of all tensors, too.
void refuse_unless_registered(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                              torch::jit::Stack* stack) {
  constexpr auto nested = c10::DispatchKey::AutogradNestedTensor;
  if (!op.hasKernelForDispatchKey(nested) && keys.has(nested) &&
      op.hasKernelForDispatchKey(c10::DispatchKey::Autograd)) {
    kernel_of_autograd(op).callBoxed(op, keys, stack);
  } else {
    refuse_unless_of_rows(op, keys, stack);
  }
}

}  // namespace

std::vector<c10::RegistrationHandleRAII> refuse_nested_tensors(const std::string& operator_name) {
  std::vector<c10::RegistrationHandleRAII> registrations;
  if (!find_operator(operator_name).hasKernelForDispatchKey(kNestedKey)) {
    registrations.push_back(
        hold_kernel(operator_name, kNestedKey,
                    c10::KernelFunction::makeFromBoxedFunction<&refuse_unless_registered>()));
  }
  return registrations;
}

void refuse_nested_tensors(torch::Library& library, const char* operator_name) {
  library.impl(
      operator_name,
      torch::dispatch(kNestedKey,
                      torch::CppFunction::makeFromBoxedFunction<&refuse_unless_of_rows>()));
}

namespace {

// Counter of an operator that is looked up by its OperatorName.
struct Known {
  c10::OperatorName name;
  OperatorCount* count;
};

struct Registry {
  ForkMutex mutex;
  // std::map: references to elements stay valid.
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

// Hashing a name, let alone printing it, takes a good part of the time of a small call. So each
// thread caches what it has found, at a place derived from the name's address. The cache is an
// array, which needs no destructor, since a thread may run operators until it ends.
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
