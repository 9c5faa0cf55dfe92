#include "launch/registration.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <ATen/native/Resize.h>

#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "launch/fork_mutex.h"

namespace foo {

namespace {

struct NativeKernels {
  ForkMutex mutex;
  std::set<std::string> names;
};

NativeKernels& native_kernels() {
  static auto* instance = new NativeKernels();
  return *instance;
}

}  // namespace

bool has_native_kernel(const std::string& operator_name) {
  const std::lock_guard lock(native_kernels().mutex);
  return native_kernels().names.count(operator_name) > 0;
}

c10::OperatorHandle find_operator(const std::string& name) {
  const size_t dot = name.find('.');
  const std::string overload = dot == std::string::npos ? "" : name.substr(dot + 1);
  return c10::Dispatcher::singleton().findSchemaOrThrow(name.substr(0, dot).c_str(),
                                                        overload.c_str());
}

std::string short_name(const std::string& operator_name) {
  const size_t start = operator_name.rfind(':') + 1;
  return operator_name.substr(start, operator_name.find('.', start) - start);
}

c10::SafeKernelFunction kernel_of_autograd(const c10::OperatorHandle& op) {
  // XLA stands for any device: no kernel of this package is for it.
  return op.getComputedKernelForDispatchKey(c10::DispatchKey::AutogradXLA);
}

c10::RegistrationHandleRAII hold_kernel(const std::string& operator_name, c10::DispatchKey key,
                                        c10::KernelFunction kernel) {
  if (c10::toFunctionalityKey(key) == c10::DispatchKey::Dense) {
    const std::lock_guard lock(native_kernels().mutex);
    native_kernels().names.insert(operator_name);
  }
  return c10::Dispatcher::singleton().registerImpl(find_operator(operator_name).operator_name(),
                                                   key, std::move(kernel), std::nullopt, nullptr,
                                                   "foo_ops");
}

void register_kernel(const std::string& operator_name, c10::DispatchKey key,
                     c10::KernelFunction kernel) {
  // Never destroyed: at exit the dispatcher may be gone already.
  static auto* registrations = new std::vector<c10::RegistrationHandleRAII>();
  static ForkMutex mutex;
  auto registration = hold_kernel(operator_name, key, std::move(kernel));
  const std::lock_guard lock(mutex);
  registrations->push_back(std::move(registration));
}

namespace {

class OperatorList final : public c10::OpRegistrationListener {
 public:
  explicit OperatorList(std::vector<c10::OperatorHandle>& operators) : operators_(operators) {}

  void onOperatorRegistered(const c10::OperatorHandle& op) override { operators_.push_back(op); }
  void onOperatorDeregistered(const c10::OperatorHandle&) override {}

 private:
  std::vector<c10::OperatorHandle>& operators_;
};

}  // namespace

std::vector<c10::OperatorHandle> all_operators() {
  std::vector<c10::OperatorHandle> operators;
  // A new listener is notified of all operators at once. Otherwise the dispatcher's list of names
  // would have to be copied, and each name looked up.
  const auto registration = c10::Dispatcher::singleton().addRegistrationListener(
      std::make_unique<OperatorList>(operators));
  return operators;
}

namespace {

// Pairs of a tensor with a bit set and its resolved copy.
using Replaced = std::vector<std::pair<at::Tensor, at::Tensor>>;

at::Tensor resolved(const at::Tensor& tensor, Replaced& replaced) {
  if (!tensor.defined() || !(tensor.is_conj() || tensor.is_neg())) return tensor;
  // A tensor that is passed twice must stay one tensor.
  for (const auto& [original, copy] : replaced) {
    if (original.is_same(tensor)) return copy;
  }
  replaced.emplace_back(tensor, tensor.resolve_conj().resolve_neg());
  return replaced.back().second;
}

c10::IValue resolved(const c10::IValue& value, Replaced& replaced) {
  if (value.isTensor()) return resolved(value.toTensor(), replaced);
  if (!value.isTensorList()) return value;
  std::vector<at::Tensor> tensors;
  for (const at::Tensor& tensor : value.toTensorVector()) {
    tensors.push_back(resolved(tensor, replaced));
  }
  return tensors;
}

class ResolvingMathBits final : public c10::OperatorKernel {
 public:
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const auto& arguments = op.schema().arguments();
    const size_t first = stack->size() - arguments.size();
    Replaced written, read;
    for (size_t i = 0; i < arguments.size(); ++i) {
      const auto* const alias = arguments[i].alias_info();
      const bool is_written = alias != nullptr && alias->isWrite();
      c10::IValue& value = (*stack)[first + i];
      value = resolved(value, is_written ? written : read);
    }
    constexpr auto kLast = c10::DispatchKey::Conjugate;
    op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kLast), stack);
    const size_t results = stack->size() - op.schema().returns().size();
    for (const auto& [original, copy] : written) {
      at::native::resize_output(original, copy.sizes());
      original.copy_(copy);
      for (size_t i = results; i < stack->size(); ++i) {
        c10::IValue& result = (*stack)[i];
        if (result.isTensor() && result.toTensor().is_same(copy)) result = original;
      }
    }
  }
};

}  // namespace

Registrations resolve_math_bits(const std::string& operator_name) {
  Registrations registrations;
  for (const auto key : {c10::DispatchKey::Conjugate, c10::DispatchKey::Negative}) {
    registrations.push_back(hold_kernel(
        operator_name, key,
        c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<ResolvingMathBits>())));
  }
  return registrations;
}

namespace {

constexpr const char* kSuffix = "_number";

class NumberReader final : public c10::OperatorKernel {
 public:
  NumberReader(const c10::FunctionSchema& schema, const c10::OperatorHandle& of) : of_(of) {
    const auto& arguments = of.schema().arguments();
    for (size_t i = 0; i < arguments.size(); ++i) {
      const auto number = schema.argumentIndexWithName(arguments[i].name() + kSuffix);
      if (number.has_value()) numbers_.emplace_back(*number, i);
    }
  }

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    auto arguments = torch::jit::pop(*stack, op.schema().arguments().size());
    for (const auto& [number, place] : numbers_) {
      if (arguments[number].isNone()) continue;
      arguments[place] = arguments[number].toTensor().item().toDouble();
    }
    arguments.resize(of_.schema().arguments().size());
    {
      const at::AutoDispatchBelowAutograd guard;
      of_.callBoxed(&arguments);
    }
    for (auto& result : arguments) stack->push_back(std::move(result));
  }

 private:
  c10::OperatorHandle of_;
  std::vector<std::pair<size_t, size_t>> numbers_;
};

}  // namespace

c10::RegistrationHandleRAII register_tensor_numbers(const std::string& operator_name,
                                                    c10::DispatchKey key, const std::string& of) {
  return hold_kernel(operator_name, key,
                     c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<NumberReader>(
                         find_operator(operator_name).schema(), find_operator(of))));
}

NamedCall::NamedCall(const std::string& operator_name, const std::vector<std::string>& arguments)
    : operator_(find_operator(operator_name)) {
  for (const auto& argument : operator_.schema().arguments()) {
    defaults_.push_back(argument.default_value().value_or(c10::IValue()));
  }
  for (const std::string& argument : arguments) {
    const auto place = operator_.schema().argumentIndexWithName(argument);
    TORCH_INTERNAL_ASSERT(place.has_value(), operator_name, " has no argument ", argument);
    places_.push_back(*place);
  }
}

torch::jit::Stack NamedCall::operator()(std::vector<c10::IValue> values) const {
  TORCH_INTERNAL_ASSERT(values.size() == places_.size());
  torch::jit::Stack stack = defaults_;
  for (size_t i = 0; i < values.size(); ++i) stack[places_[i]] = std::move(values[i]);
  operator_.callBoxed(stack);
  return stack;
}

}  // namespace foo
