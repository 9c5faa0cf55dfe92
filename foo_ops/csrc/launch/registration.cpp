#include "launch/registration.h"

#include <memory>
#include <mutex>
#include <set>
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

}  // namespace foo
