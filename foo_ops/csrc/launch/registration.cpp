#include "launch/registration.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/op_registration/adaption.h>
#include <ATen/core/stack.h>
#include <ATen/native/Resize.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "launch/fork_mutex.h"
#include "launch/parameter.h"

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
