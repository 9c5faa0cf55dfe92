// Finds operators by their names, to register kernels for them and to call them. In front of foo's
// kernels are checks of devices and layouts, and counts.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

namespace foo {

// Suppresses warnings of this thread during its lifetime, for kernels that ours replace on purpose.
class NoWarnings {
  class Handler final : public c10::WarningHandler {
    void process(const c10::Warning&) override {}
  };

  Handler silent_;
  const c10::WarningUtils::WarningHandlerGuard handler_{&silent_};
  // A TORCH_WARN_ONCE must not be used up here.
  const c10::WarningUtils::WarnAlways always_;
};

using Registrations = std::vector<c10::RegistrationHandleRAII>;

// Returns the operator with a name such as "foo::abs.out"; raises if there is none.
c10::OperatorHandle find_operator(const std::string& name);

// Returns the name for messages, without namespace and overload: "abs".
std::string short_name(const std::string& operator_name);

// Whether this package has ever registered a C++ kernel for the operator, as opposed to a Python
// one made of other operators.
bool has_native_kernel(const std::string& operator_name);

// Returns the kernel that an operator's author has registered for autograd of all tensors, with
// torch.library.register_autograd for example. There must be one.
c10::SafeKernelFunction kernel_of_autograd(const c10::OperatorHandle& op);

// Registers a kernel until the returned handle is destroyed.
c10::RegistrationHandleRAII hold_kernel(const std::string& operator_name, c10::DispatchKey key,
                                        c10::KernelFunction kernel);

// Registers a kernel for the rest of the process.
void register_kernel(const std::string& operator_name, c10::DispatchKey key,
                     c10::KernelFunction kernel);

// Returns all operators that are defined now, for rules that give many of them a kernel.
std::vector<c10::OperatorHandle> all_operators();

// If the conjugate or negative bit of a written argument is set, makes the operator write to a
// copy, which is then copied back. PyTorch's own fallback assumes that such an operator returns
// what it writes, and otherwise frees memory that it does not own.
Registrations resolve_math_bits(const std::string& operator_name);

// Registers a kernel that calls another operator, ``of``. The operator takes the arguments of
// ``of`` first, then optional tensors named "<argument>_number", which replace these arguments:
// compiled programs pass floating-point numbers as tensors.
c10::RegistrationHandleRAII register_tensor_numbers(const std::string& operator_name,
                                                    c10::DispatchKey key, const std::string& of);

// A call with arguments that are known by their names. All others have their defaults, so that
// callers need not know them.
class NamedCall {
 public:
  NamedCall(const std::string& operator_name, const std::vector<std::string>& arguments);

  // Calls the operator and returns its results. The values are those of the named arguments, in
  // their order.
  torch::jit::Stack operator()(std::vector<c10::IValue> values) const;

 private:
  c10::OperatorHandle operator_;
  torch::jit::Stack defaults_;
  std::vector<int64_t> places_;
};

// Runs in front of every launcher of foo: checks of devices and layouts, and counts.

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
