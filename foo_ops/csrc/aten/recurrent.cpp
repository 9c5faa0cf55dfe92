// LSTM, GRU and RNN layers run on the CPU as a whole, with autograd's graph.

#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/sigmoid_backward.h>
#include <ATen/ops/tanh_backward.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "aten/aten.h"
#include "aten/host_call.h"
#include "aten/operator_kinds.h"
#include "device/device.h"
#include "launch/autograd.h"
#include "launch/registration.h"

namespace foo::aten {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Autograd functions from foo tensors to host aliases and back: the backward of each is the other.
// One node serves all tensors of a call, since each node costs as much as a small operator.
struct ToHost : torch::autograd::Function<ToHost> {
  static variable_list forward(AutogradContext* context, at::TensorList foo, c10::Device device);
  static variable_list backward(AutogradContext* context, const variable_list& gradients);
};

struct ToFoo : torch::autograd::Function<ToFoo> {
  static variable_list forward(AutogradContext* context, at::TensorList host, c10::Device device);
  static variable_list backward(AutogradContext* context, const variable_list& gradients);
};

// Converts tensors with a HostCall. Marks results that need no gradient, so that the other side's
// operators compute none either.
variable_list cross(AutogradContext* context, at::TensorList from, c10::Device device,
                    Tensor (HostCall::*to)(const Tensor&)) {
  context->saved_data["device"] = device;
  HostCall call(device);
  variable_list made, without;
  for (const Tensor& tensor : from) {
    made.push_back((call.*to)(tensor.detach()));
    if (!tensor.requires_grad()) without.push_back(made.back());
  }
  context->mark_non_differentiable(without);
  context->set_materialize_grads(false);
  return made;
}

// Converts each defined gradient to the other side, and appends an undefined one for the device.
template <typename Other>
variable_list gradients_by(AutogradContext* context, const variable_list& gradients) {
  const auto device = context->saved_data["device"].toDevice();
  variable_list given;
  for (const Tensor& gradient : gradients) {
    if (gradient.defined()) given.push_back(gradient);
  }
  variable_list made = Other::apply(at::TensorList(given), device);
  variable_list results(gradients.size() + 1);
  auto next = made.begin();
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (gradients[i].defined()) results[i] = std::move(*next++);
  }
  return results;
}

variable_list ToHost::forward(AutogradContext* context, at::TensorList foo, c10::Device device) {
  return cross(context, foo, device, &HostCall::to_host);
}

variable_list ToHost::backward(AutogradContext* context, const variable_list& gradients) {
  return gradients_by<ToFoo>(context, gradients);
}

variable_list ToFoo::forward(AutogradContext* context, at::TensorList host, c10::Device device) {
  return cross(context, host, device, &HostCall::to_foo);
}

variable_list ToFoo::backward(AutogradContext* context, const variable_list& gradients) {
  return gradients_by<ToHost>(context, gradients);
}

// Replaces the foo tensors on a stack, from `first` on, by host aliases.
void to_host(torch::jit::Stack& stack, size_t first, c10::Device device) {
  variable_list foo;
  for (size_t i = first; i < stack.size(); ++i) {
    for_each_tensor(stack[i], [&](const Tensor& tensor) {
      if (!tensor.is_cpu()) foo.push_back(tensor);
    });
  }
  const variable_list host = ToHost::apply(at::TensorList(foo), device);
  auto next = host.begin();
  const auto host_of = [&](const Tensor& tensor) {
    if (tensor.is_cpu()) return tensor;
    const Tensor& alias = *next++;
    // Share the version counter: autograd must notice when a saved tensor is written.
    if (!tensor.is_inference() && !alias.is_inference()) {
      alias.unsafeGetTensorImpl()->set_version_counter(
          tensor.unsafeGetTensorImpl()->version_counter());
    }
    return alias;
  };
  for (size_t i = first; i < stack.size(); ++i) replace_tensors(stack[i], host_of);
}

// Replaces all tensors, which are results on the CPU, by tensors of foo.
void to_foo(torch::jit::Stack& stack, size_t first, c10::Device device) {
  variable_list host;
  for (size_t i = first; i < stack.size(); ++i) {
    for_each_tensor(stack[i], [&](const Tensor& tensor) { host.push_back(tensor); });
  }
  const variable_list foo = ToFoo::apply(at::TensorList(host), device);
  auto next = foo.begin();
  for (size_t i = first; i < stack.size(); ++i) {
    replace_tensors(stack[i], [&](const Tensor&) { return *next++; });
  }
}

// Whether a tensor has no wrapper: wrappers, such as fake tensors, and modes must see the operators
// that the composite consists of.
bool has_no_wrapper(const Tensor& tensor) {
  constexpr c10::DispatchKeySet kWrappers(
      {c10::DispatchKey::Python, c10::DispatchKey::FuncTorchGradWrapper,
       c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::Functionalize});
  return tensor.has_storage() && !tensor.key_set().has_any(kWrappers);
}

bool is_mode_active() {
  return c10::impl::tls_local_dispatch_key_set().included_.has(c10::DispatchKey::Python);
}

// Arguments of a call, by name.
class Arguments {
 public:
  Arguments(const c10::OperatorHandle& op, at::ArrayRef<c10::IValue> values)
      : values_(values.vec()) {
    const auto& parameters = op.schema().arguments();
    for (size_t i = 0; i < values_.size(); ++i) places_[parameters[i].name()] = i;
  }

  c10::IValue& operator[](const std::string& name) { return values_[places_.at(name)]; }
  c10::IValue& first() { return values_.front(); }

  torch::jit::Stack stack() const { return values_; }

 private:
  std::vector<c10::IValue> values_;
  std::map<std::string, size_t> places_;
};

// Layers with dropout between them. The CPU's operator would draw from the CPU's generator; dropout
// on tensors of foo draws the same numbers from foo's.
class DroppingLayers {
 public:
  DroppingLayers(const c10::OperatorHandle& op, at::ArrayRef<c10::IValue> arguments)
      : op_(op), arguments_(op, arguments) {
    count_ = arguments_["num_layers"].toInt();
    dropout_ = arguments_["dropout"].toDouble();
    parameters_ = arguments_["params"].toTensorVector();
    const c10::IValue& states = arguments_["hx"];
    states_ = states.isTensor() ? variable_list{states.toTensor()} : states.toTensorVector();
  }

  // Whether there is such dropout, and the states and parameters can be divided among the layers.
  bool are_there() {
    const bool drops = arguments_["train"].toBool() && dropout_ > 0.0 && count_ > 1;
    const auto has_share = [&](const Tensor& state) {
      return state.dim() == 3 && state.size(0) % count_ == 0;
    };
    return drops && parameters_.size() % count_ == 0 &&
           std::all_of(states_.begin(), states_.end(), has_share);
  }

  // Calls the operator layer by layer.
  torch::jit::Stack operator()() {
    arguments_["num_layers"] = int64_t{1};
    arguments_["dropout"] = 0.0;
    c10::IValue& sequence = arguments_.first();
    std::vector<variable_list> states(states_.size());
    for (int64_t layer = 0; layer < count_; ++layer) {
      torch::jit::Stack results = run(layer);
      for (size_t i = 0; i < states.size(); ++i) states[i].push_back(results[1 + i].toTensor());
      const Tensor output = results[0].toTensor();
      sequence = layer + 1 < count_ ? at::dropout(output, dropout_, /*train=*/true) : output;
    }
    torch::jit::Stack results = {sequence};
    for (const variable_list& state : states) results.emplace_back(at::cat(state));
    return results;
  }

 private:
  torch::jit::Stack run(int64_t layer) {
    const auto share = int64_t(parameters_.size()) / count_;
    const auto first = parameters_.begin() + layer * share;
    arguments_["params"] = variable_list(first, first + share);
    variable_list states;
    for (const Tensor& state : states_) {
      const int64_t directions = state.size(0) / count_;
      states.push_back(state.narrow(0, layer * directions, directions));
    }
    c10::IValue& given = arguments_["hx"];
    given = given.isTensor() ? c10::IValue(states[0]) : c10::IValue(states);
    torch::jit::Stack stack = arguments_.stack();
    op_.callBoxed(stack);
    return stack;
  }

  const c10::OperatorHandle& op_;
  Arguments arguments_;
  int64_t count_;
  double dropout_;
  variable_list parameters_;
  variable_list states_;
};

// Returns the common foo device of all tensors; packed sequences have their lengths on the CPU.
std::optional<c10::Device> common_device(const c10::OperatorHandle& op,
                                         at::ArrayRef<c10::IValue> arguments) {
  std::optional<c10::Device> device;
  bool is_common = true;
  for (size_t position = 0; position < arguments.size(); ++position) {
    if (op.schema().arguments()[position].name() == "batch_sizes") continue;
    for_each_tensor(arguments[position], [&](const Tensor& tensor) {
      if (!device) device = tensor.device();
      is_common = is_common && has_no_wrapper(tensor) && tensor.device() == *device;
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
    if (!device || is_mode_active() || has_tangent(op, *stack) ||
        at::autocast::is_autocast_enabled(device::kFoo)) {
      composite_.callBoxed(op, keys, stack);
      return;
    }
    DroppingLayers dropping(op, arguments);
    if (dropping.are_there()) {
      torch::jit::drop(*stack, count);
      for (c10::IValue& result : dropping()) stack->push_back(std::move(result));
      return;
    }
    count_fallback(op);
    const size_t first = stack->size() - count;
    to_host(*stack, first, *device);
    {
      const c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::autocast_dispatch_keyset);
      const device::HostTensorsInDeviceMemory in_device_memory(device->index());
      op.callBoxed(stack);
    }
    to_foo(*stack, first, *device);
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
      // The second key is for inference mode, which skips autograd.
      for (const auto key :
           {c10::DispatchKey::AutogradPrivateUse1, c10::DispatchKey::PrivateUse1}) {
        register_kernel(
            full_name, key,
            c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<Layer>(composite)));
      }
    }
  }
}

// Cells of LSTM and GRU. torch composes them of smaller operators only on the CPU; devices like foo
// have operators for the whole cell.
namespace {

using OptionalTensor = std::optional<at::Tensor>;

OptionalTensor to_host(HostCall& call, const OptionalTensor& tensor) {
  if (!tensor.has_value() || !tensor->defined()) return std::nullopt;
  return call.to_host(*tensor);
}

at::Tensor add_bias(const at::Tensor& gates, const OptionalTensor& bias) {
  return bias.has_value() ? gates + *bias : gates;
}

at::Tensor bias_gradient(const at::Tensor& grad_gates, bool has_bias) {
  return has_bias ? grad_gates.sum(0) : at::Tensor();
}

// The workspace holds the four gates after their activation, for the backward pass.
std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(const at::Tensor& input_gates,
                                                         const at::Tensor& hidden_gates,
                                                         const at::Tensor& cx,
                                                         const OptionalTensor& input_bias,
                                                         const OptionalTensor& hidden_bias) {
  HostCall call(input_gates.device());
  at::Tensor gates = add_bias(call.to_host(input_gates), to_host(call, input_bias)) +
                     add_bias(call.to_host(hidden_gates), to_host(call, hidden_bias));
  const auto parts = gates.chunk(4, 1);
  const at::Tensor input = parts[0].sigmoid_();
  const at::Tensor forget = parts[1].sigmoid_();
  const at::Tensor cell = parts[2].tanh_();
  const at::Tensor output = parts[3].sigmoid_();
  const at::Tensor cy = forget * call.to_host(cx) + input * cell;
  const at::Tensor hy = output * cy.tanh();
  return {call.to_foo(hy), call.to_foo(cy), call.to_foo(gates)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell_backward(
    const OptionalTensor& grad_hy, const OptionalTensor& grad_cy, const at::Tensor& cx,
    const at::Tensor& cy, const at::Tensor& workspace, bool has_bias) {
  HostCall call(cx.device());
  const auto parts = call.to_host(workspace).chunk(4, 1);
  const at::Tensor &input = parts[0], &forget = parts[1], &cell = parts[2], &output = parts[3];
  const at::Tensor tanh_cy = call.to_host(cy).tanh();

  const auto host_grad_hy = to_host(call, grad_hy).value_or(at::zeros_like(tanh_cy));
  const auto host_grad_cy = to_host(call, grad_cy).value_or(at::zeros_like(tanh_cy));
  const at::Tensor grad_cell_state =
      at::tanh_backward(host_grad_hy * output, tanh_cy) + host_grad_cy;
  const at::Tensor grad_gates =
      at::cat({at::sigmoid_backward(grad_cell_state * cell, input),
               at::sigmoid_backward(grad_cell_state * call.to_host(cx), forget),
               at::tanh_backward(grad_cell_state * input, cell),
               at::sigmoid_backward(host_grad_hy * tanh_cy, output)},
              1);
  return {call.to_foo(grad_gates), call.to_foo(grad_cell_state * forget),
          call.to_foo(bias_gradient(grad_gates, has_bias))};
}

// The workspace holds reset, update and new gate, the old state, and the hidden part of the new
// gate.
std::tuple<at::Tensor, at::Tensor> gru_cell(const at::Tensor& input_gates,
                                            const at::Tensor& hidden_gates, const at::Tensor& hx,
                                            const OptionalTensor& input_bias,
                                            const OptionalTensor& hidden_bias) {
  HostCall call(input_gates.device());
  const auto input_parts =
      add_bias(call.to_host(input_gates), to_host(call, input_bias)).chunk(3, 1);
  const auto hidden_parts =
      add_bias(call.to_host(hidden_gates), to_host(call, hidden_bias)).chunk(3, 1);
  const at::Tensor state = call.to_host(hx);
  const at::Tensor reset = (input_parts[0] + hidden_parts[0]).sigmoid_();
  const at::Tensor update = (input_parts[1] + hidden_parts[1]).sigmoid_();
  const at::Tensor fresh = (input_parts[2] + reset * hidden_parts[2]).tanh_();
  const at::Tensor hy = (state - fresh) * update + fresh;
  return {call.to_foo(hy), call.to_foo(at::cat({reset, update, fresh, state, hidden_parts[2]}, 1))};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> gru_cell_backward(
    const at::Tensor& grad_hy, const at::Tensor& workspace, bool has_bias) {
  HostCall call(grad_hy.device());
  const auto parts = call.to_host(workspace).chunk(5, 1);
  const at::Tensor &reset = parts[0], &update = parts[1], &fresh = parts[2], &state = parts[3],
                   &hidden = parts[4];
  const at::Tensor grad = call.to_host(grad_hy);

  const at::Tensor grad_fresh = at::tanh_backward(grad * (1 - update), fresh);
  const at::Tensor grad_update = at::sigmoid_backward(grad * (state - fresh), update);
  const at::Tensor grad_reset = at::sigmoid_backward(grad_fresh * hidden, reset);
  const at::Tensor grad_input_gates = at::cat({grad_reset, grad_update, grad_fresh}, 1);
  const at::Tensor grad_hidden_gates = at::cat({grad_reset, grad_update, grad_fresh * reset}, 1);
  return {call.to_foo(grad_input_gates), call.to_foo(grad_hidden_gates), call.to_foo(grad * update),
          call.to_foo(bias_gradient(grad_input_gates, has_bias)),
          call.to_foo(bias_gradient(grad_hidden_gates, has_bias))};
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  register_own_kernel<"aten::_thnn_fused_lstm_cell", &lstm_cell>(library);
  register_own_kernel<"aten::_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward>(library);
  register_own_kernel<"aten::_thnn_fused_gru_cell", &gru_cell>(library);
  register_own_kernel<"aten::_thnn_fused_gru_cell_backward", &gru_cell_backward>(library);
}

}  // namespace foo::aten
