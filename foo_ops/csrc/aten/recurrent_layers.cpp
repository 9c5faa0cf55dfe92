#include "aten/recurrent_layers.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "aten/boxed_tensors.h"
#include "aten/host_call.h"
#include "device/device.h"
#include "launch/autograd.h"
#include "launch/operator_counts.h"
#include "launch/registration.h"

namespace foo::aten {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The host alias of a tensor, and its way back, for autograd: the gradient of one is the other.
struct ToHost : torch::autograd::Function<ToHost> {
  static Tensor forward(AutogradContext* context, const Tensor& foo);
  static variable_list backward(AutogradContext* context, const variable_list& gradients);
};

struct ToFoo : torch::autograd::Function<ToFoo> {
  static Tensor forward(AutogradContext*, const Tensor& host, c10::Device device) {
    return HostCall(device).to_foo(host.detach());
  }
  static variable_list backward(AutogradContext*, const variable_list& gradients) {
    const Tensor& gradient = gradients[0];
    return {gradient.defined() ? ToHost::apply(gradient) : Tensor(), Tensor()};
  }
};

Tensor ToHost::forward(AutogradContext* context, const Tensor& foo) {
  context->saved_data["device"] = foo.device();
  return HostCall(foo.device()).to_host(foo.detach());
}

variable_list ToHost::backward(AutogradContext* context, const variable_list& gradients) {
  const Tensor& gradient = gradients[0];
  const auto device = context->saved_data["device"].toDevice();
  return {gradient.defined() ? ToFoo::apply(gradient, device) : Tensor()};
}

// The alias counts as written when the tensor is: autograd then refuses what it has saved.
Tensor to_host(const Tensor& foo) {
  if (foo.is_cpu()) return foo;
  Tensor host = ToHost::apply(foo);
  if (!foo.is_inference() && !host.is_inference()) {
    host.unsafeGetTensorImpl()->set_version_counter(foo.unsafeGetTensorImpl()->version_counter());
  }
  return host;
}

// Wrappers, such as fake tensors, and modes see the operators that the composite is made of.
bool is_plain(const Tensor& tensor) {
  constexpr c10::DispatchKeySet kWrappers(
      {c10::DispatchKey::Python, c10::DispatchKey::FuncTorchGradWrapper,
       c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::Functionalize});
  return tensor.has_storage() && !tensor.key_set().has_any(kWrappers);
}

bool is_mode_active() {
  return c10::impl::tls_local_dispatch_key_set().included_.has(c10::DispatchKey::Python);
}

// Dropout between the layers would draw from the generator of the CPU.
bool drops(const c10::OperatorHandle& op, at::ArrayRef<c10::IValue> arguments) {
  const auto& parameters = op.schema().arguments();
  double dropout = 0.0;
  bool train = false;
  for (size_t position = 0; position < arguments.size(); ++position) {
    if (parameters[position].name() == "dropout") dropout = arguments[position].toDouble();
    if (parameters[position].name() == "train") train = arguments[position].toBool();
  }
  return train && dropout > 0.0;
}

// The one device of foo of all tensors; packed sequences have their lengths on the CPU.
std::optional<c10::Device> common_device(const c10::OperatorHandle& op,
                                         at::ArrayRef<c10::IValue> arguments) {
  std::optional<c10::Device> device;
  bool is_common = true;
  for (size_t position = 0; position < arguments.size(); ++position) {
    if (op.schema().arguments()[position].name() == "batch_sizes") continue;
    for_each_tensor(arguments[position], [&](const Tensor& tensor) {
      if (!device) device = tensor.device();
      is_common = is_common && is_plain(tensor) && tensor.device() == *device;
    });
  }
  return is_common && device && device->type() == device::kFoo ? device : std::nullopt;
}

class Layer final : public c10::OperatorKernel {
 public:
  explicit Layer(c10::SafeKernelFunction composite) : composite_(std::move(composite)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack) {
    const size_t count = op.schema().arguments().size();
    const auto arguments = torch::jit::last(*stack, count);
    const auto device = common_device(op, arguments);
    if (!device || is_mode_active() || drops(op, arguments) || has_tangent(op, *stack) ||
        at::autocast::is_autocast_enabled(device::kFoo)) {
      composite_.callBoxed(op, keys, stack);
      return;
    }
    count_fallback(op);
    const size_t first = stack->size() - count;
    for (size_t position = first; position < stack->size(); ++position) {
      replace_tensors((*stack)[position], to_host);
    }
    {
      const c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::autocast_dispatch_keyset);
      const device::HostTensorsInDeviceMemory in_device_memory(device->index());
      op.callBoxed(stack);
    }
    for (size_t position = first; position < stack->size(); ++position) {
      replace_tensors((*stack)[position],
                      [&](const Tensor& host) { return ToFoo::apply(host, *device); });
    }
  }

 private:
  c10::SafeKernelFunction composite_;
};

}  // namespace

void register_recurrent_layers() {
  for (const char* name : {"aten::lstm", "aten::gru", "aten::rnn_tanh", "aten::rnn_relu"}) {
    for (const char* overload : {".input", ".data"}) {
      const std::string full_name = std::string(name) + overload;
      const auto composite = find_operator(full_name).getComputedKernelForDispatchKey(
          c10::DispatchKey::AutogradPrivateUse1);
      // The second is for inference mode, which skips autograd.
      for (const auto key :
           {c10::DispatchKey::AutogradPrivateUse1, c10::DispatchKey::PrivateUse1}) {
        register_kernel(
            full_name, key,
            c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<Layer>(composite)));
      }
    }
  }
}

}  // namespace foo::aten
