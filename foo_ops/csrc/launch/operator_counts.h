// Runs in front of every launcher of foo: checks of devices and layouts, and counts.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

namespace foo {

// Devices that the tensors of a call may be on.
enum class Devices {
  kOne,
  kAny,
};

template <typename Argument>
constexpr bool is_tensor = std::is_same_v<std::decay_t<Argument>, at::Tensor> ||
                           std::is_same_v<std::decay_t<Argument>, std::optional<at::Tensor>>;

inline const at::Tensor* tensor_in(const at::Tensor& argument) {
  return argument.defined() ? &argument : nullptr;
}

inline const at::Tensor* tensor_in(const std::optional<at::Tensor>& argument) {
  return argument.has_value() ? tensor_in(*argument) : nullptr;
}

template <typename Argument>
const at::Tensor* tensor_in(const Argument&) {
  return nullptr;
}

// Raises unless all tensors are on the device of the first one on foo. torch writes this check in
// front of the kernels of its own devices. `tensors` are in the order of the operator's arguments,
// null for a missing one.
void check_one_device(const char* operator_name, at::ArrayRef<const at::Tensor*> tensors);

template <typename... Arguments>
void check_devices(const char* operator_name, const Arguments&... arguments) {
  constexpr int kTensors = (0 + ... + (is_tensor<Arguments> ? 1 : 0));
  if constexpr (kTensors > 1) check_one_device(operator_name, {tensor_in(arguments)...});
}

// No kernel takes nested tensors: their rows differ in length, and they have no sizes. Operators on
// rows get their contents from a kernel on the key AutogradNestedTensor.

// Makes an operator refuse nested tensors on every device, with gradients and without, unless its
// author has registered a kernel for them.
std::vector<c10::RegistrationHandleRAII> refuse_nested_tensors(const std::string& operator_name);

// Same for an operator of this package, which may be defined later. A kernel on its Autograd key
// does not handle nested tensors.
void refuse_nested_tensors(torch::Library& library, const char* operator_name);

// Counts how often each operator ran on foo, with a kernel of foo's own or with the CPU's through
// the fallback. The counts show which kernel a new backend needs next.
struct OperatorCount {
  std::atomic<int64_t> own = 0;
  std::atomic<int64_t> fallback = 0;
};

// Returns the counter by the name with the overload, "aten::add.Tensor". It lives as long as the
// process.
OperatorCount& operator_count(const std::string& name);

// Returns the counter of an operator's kernel for a dispatch key; null for the CPU, which is not
// counted.
OperatorCount* count_for(c10::DispatchKey key, const std::string& name);

// Work of the device before the first call on foo, null when done. The device sets it, and sets it
// again in a forked child, where it raises.
extern std::atomic<void (*)()> before_first_call;

// Every launcher calls this first, also if it allocates nothing.
inline void begin_call(OperatorCount* count) {
  if (count == nullptr) return;
  auto* const prepare = before_first_call.load(std::memory_order_relaxed);
  if (prepare != nullptr) prepare();
  count->own.fetch_add(1, std::memory_order_relaxed);
}

void count_own(const c10::OperatorHandle& op);
void count_fallback(const c10::OperatorHandle& op);

// Returns the counts (own kernel, fallback) of each operator that ran since the start or the last
// reset.
std::map<std::string, std::pair<int64_t, int64_t>> operator_counts();
void reset_operator_counts();

// A string as a template argument.
template <size_t size>
struct Name {
  char text[size];
  consteval Name(const char (&characters)[size]) { std::copy_n(characters, size, text); }
};

template <Name name, auto function, Devices devices>
struct Counted;

template <Name name, typename Result, typename... Arguments, Result (*function)(Arguments...),
          Devices devices>
struct Counted<name, function, devices> {
  static Result call(Arguments... arguments) {
    if constexpr (devices == Devices::kOne) check_devices(name.text, arguments...);
    static OperatorCount& count = operator_count(name.text);
    count.own.fetch_add(1, std::memory_order_relaxed);
    return function(std::forward<Arguments>(arguments)...);
  }
};

// Registers a kernel that counts its calls and refuses tensors of several devices. The name is the
// full one, "aten::view".
template <Name name, auto function, Devices devices = Devices::kOne>
void register_own_kernel(torch::Library& library) {
  library.impl(name.text, &Counted<name, function, devices>::call);
}

// Registers one kernel on the CPU, where calls are not counted, and on foo. It must check devices
// itself, and gets no nested tensors.
template <Name name, auto function>
void register_shared_kernel(torch::Library& library) {
  library.impl(name.text, torch::dispatch(c10::DispatchKey::CPU, function));
  library.impl(name.text, torch::dispatch(c10::DispatchKey::PrivateUse1,
                                          &Counted<name, function, Devices::kAny>::call));
  refuse_nested_tensors(library, name.text);
}

}  // namespace foo
