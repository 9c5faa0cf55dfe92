#include "aten/observers.h"

#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_set>
#include <utility>

#include "aten/operator_kinds.h"
#include "device/device.h"
#include "device/stream.h"
#include "launch/fork_mutex.h"
#include "launch/memory.h"
#include "launch/registration.h"

namespace foo::aten {

c10::Stream stream_of_call(c10::ArrayRef<c10::IValue> arguments) {
  std::optional<c10::DeviceIndex> of_tensor;
  std::optional<c10::DeviceIndex> named;
  for (const c10::IValue& argument : arguments) {
    for_each_tensor(argument, [&](const at::Tensor& tensor) {
      const bool is_first = !of_tensor && tensor.device().type() == device::kFoo;
      if (is_first) of_tensor = tensor.device().index();
    });
    if (argument.isDevice() && argument.toDevice().type() == device::kFoo) {
      named = device::with_index(argument.toDevice()).index();
    }
  }
  return device::current_stream(of_tensor.value_or(named.value_or(device::current_device())));
}

std::set<c10::DeviceIndex> devices_of_call(c10::ArrayRef<c10::IValue> arguments) {
  std::set<c10::DeviceIndex> of_tensors;
  for (const c10::IValue& argument : arguments) {
    for_each_tensor(argument, [&](const at::Tensor& tensor) {
      if (tensor.device().type() == device::kFoo) of_tensors.insert(tensor.device().index());
    });
  }
  if (of_tensors.empty()) of_tensors.insert(stream_of_call(arguments).device_index());
  return of_tensors;
}

namespace {

constexpr c10::DispatchKey kObservedKeys[] = {
    c10::DispatchKey::PrivateUse1, c10::DispatchKey::QuantizedPrivateUse1,
    c10::DispatchKey::SparsePrivateUse1, c10::DispatchKey::SparseCsrPrivateUse1,
    c10::DispatchKey::NestedTensorPrivateUse1};

class ObservedKernel final : public c10::OperatorKernel {
 public:
  explicit ObservedKernel(c10::SafeKernelFunction kernel) : kernel_(std::move(kernel)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack) {
    observe_operator(op, stack, [&] { kernel_.callBoxed(op, keys, stack); });
  }

 private:
  c10::SafeKernelFunction kernel_;
};

// A Python kernel consists of operators, which are observed when they are called, but it may also
// pass addresses to its own code.
class KernelInPython final : public c10::OperatorKernel {
 public:
  explicit KernelInPython(c10::SafeKernelFunction kernel) : kernel_(std::move(kernel)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack) {
    const DeviceAccess access;
    kernel_.callBoxed(op, keys, stack);
  }

 private:
  c10::SafeKernelFunction kernel_;
};

c10::KernelFunction observed(c10::SafeKernelFunction kernel, bool is_native) {
  if (is_native) {
    return c10::KernelFunction::makeFromBoxedFunctor(
        std::make_unique<ObservedKernel>(std::move(kernel)));
  }
  return c10::KernelFunction::makeFromBoxedFunctor(
      std::make_unique<KernelInPython>(std::move(kernel)));
}

// Operators whose kernels have not been examined yet: at first all of them. Operators defined later
// get their kernels after their definition, so they are examined at their first call.
class NewOperators {
 public:
  void add(const c10::OperatorName& name) {
    const std::lock_guard lock(mutex_);
    names_.insert(name);
    are_there_.store(true, std::memory_order_release);
  }

  // Removes an operator and returns whether it was in the set.
  bool take(const c10::OperatorName& name) {
    if (!are_there_.load(std::memory_order_acquire)) return false;
    const std::lock_guard lock(mutex_);
    const bool is_new = names_.erase(name) > 0;
    are_there_.store(!names_.empty(), std::memory_order_release);
    return is_new;
  }

  std::unordered_set<c10::OperatorName> take_all() {
    const std::lock_guard lock(mutex_);
    are_there_.store(false, std::memory_order_release);
    return std::exchange(names_, {});
  }

 private:
  ForkMutex mutex_;
  std::unordered_set<c10::OperatorName> names_;
  std::atomic<bool> are_there_ = false;
};

struct Observation {
  ForkMutex mutex;
  std::vector<c10::RegistrationHandleRAII> kernels;
  NewOperators new_operators;
  std::optional<c10::RegistrationHandleRAII> listener;
  at::CallbackHandle calls = 0;
};

// Never destroyed: at exit the dispatcher may be gone already.
Observation& observation() {
  static auto* instance = new Observation();
  return *instance;
}

class Listener final : public c10::OpRegistrationListener {
  void onOperatorRegistered(const c10::OperatorHandle& op) override {
    observation().new_operators.add(op.operator_name());
  }
  void onOperatorDeregistered(const c10::OperatorHandle& op) override {
    observation().new_operators.take(op.operator_name());
  }
};

bool is_native(const std::string& name) {
  return name.starts_with("aten::") || name.starts_with("foo::") || has_native_kernel(name);
}

void observe_kernels(const c10::OperatorHandle& op) {
  const std::string name = c10::toString(op.operator_name());
  const NoWarnings no_warnings;
  for (const c10::DispatchKey key : kObservedKeys) {
    if (!op.hasKernelForDispatchKey(key)) continue;
    auto kernel =
        hold_kernel(name, key, observed(op.getComputedKernelForDispatchKey(key), is_native(name)));
    const std::lock_guard lock(observation().mutex);
    observation().kernels.push_back(std::move(kernel));
  }
}

// Called before each operator on any device.
std::unique_ptr<at::ObserverContext> observe_call(const at::RecordFunction& call) {
  const auto name = call.operator_name();
  if (!name.has_value()) return nullptr;
  const bool is_new = observation().new_operators.take(*name);
  CallObserver* const sanitizer = call_observer(Observing::kSanitizer);
  const bool is_seen = sanitizer != nullptr && sanitizer->sees_all_devices();
  if (!is_new && !is_seen) return nullptr;
  const auto op = c10::Dispatcher::singleton().findSchema(*name);
  if (!op.has_value()) return nullptr;
  if (is_new) observe_kernels(*op);
  if (is_seen) sanitizer->before_operator(*op, call);
  return nullptr;
}

bool is_observed() {
  return std::any_of(call_observers.begin(), call_observers.end(),
                     [](const auto& observer) { return observer.load() != nullptr; });
}

void start() {
  // The listener is notified of all existing operators.
  observation().listener =
      c10::Dispatcher::singleton().addRegistrationListener(std::make_unique<Listener>());
  for (const c10::OperatorName& name : observation().new_operators.take_all()) {
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (op.has_value()) observe_kernels(*op);
  }
  observation().calls = at::addGlobalCallback(at::RecordFunctionCallback(&observe_call)
                                                  .needsInputs(true)
                                                  .scopes({at::RecordScope::FUNCTION}));
}

void stop() {
  at::removeCallback(observation().calls);
  observation().listener.reset();
  observation().kernels.clear();
}

// Serializes adding and removing of observers.
ForkMutex& change_mutex() {
  static auto* mutex = new ForkMutex();
  return *mutex;
}

}  // namespace

void add_call_observer(Observing kind, CallObserver& observer) {
  const std::lock_guard lock(change_mutex());
  if (!is_observed()) start();
  call_observers[static_cast<size_t>(kind)].store(&observer, std::memory_order_release);
}

void remove_call_observer(Observing kind) {
  const std::lock_guard lock(change_mutex());
  call_observers[static_cast<size_t>(kind)].store(nullptr, std::memory_order_release);
  if (!is_observed()) stop();
}

}  // namespace foo::aten
