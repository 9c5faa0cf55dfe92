#include "aten/fallback.h"

#include <ATen/core/op_registration/adaption.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "aten/host_call.h"
#include "aten/observers.h"
#include "aten/operator_kinds.h"
#include "device/device.h"
#include "device/generator.h"
#include "device/stream.h"
#include "launch/registration.h"

namespace foo::aten {
namespace {

using c10::IValue;

bool is_optional_generator(const c10::Type& type) {
  const auto* optional = type.castRaw<c10::OptionalType>();
  return optional != nullptr && optional->getElementType()->kind() == c10::TypeKind::GeneratorType;
}

// Whether a type is Tensor?[], as the indices of an indexing operator are.
bool is_optional_tensor_list(const c10::Type& type) {
  const auto* list = type.castRaw<c10::ListType>();
  return list != nullptr && list->getElementType()->kind() == c10::TypeKind::OptionalType;
}

// Refuses tensors of the CPU, whose operators arrive here if their generator is foo's.
void check_generator_device(at::ArrayRef<IValue> arguments) {
  const auto is_generator = [](const IValue& argument) { return argument.isGenerator(); };
  if (std::none_of(arguments.begin(), arguments.end(), is_generator)) return;
  for (const IValue& argument : arguments) {
    for_each_tensor(argument, [](const at::Tensor& tensor) {
      TORCH_CHECK(tensor.device().type() == device::kFoo, "Expected a '", tensor.device().type(),
                  "' device type for generator but found 'foo'");
    });
  }
}

struct CallDevices {
  // Device of the arguments. No argument is on foo if the call copies one there, or makes a tensor
  // like it.
  c10::Device arguments;
  // Device of new tensors that the kernel makes on the CPU: the one that the call names, as that of
  // empty_like, if it is foo or the CPU.
  c10::Device results;
};

// Returns the device of the first foo tensor, else the one named by an argument, else the current
// one.
CallDevices devices_of_call(at::ArrayRef<IValue> values) {
  std::optional<c10::Device> of_tensor;
  std::optional<c10::Device> of_generator;
  std::optional<c10::Device> named;
  for (const IValue& value : values) {
    for_each_tensor(value, [&](const at::Tensor& tensor) {
      if (!of_tensor && tensor.device().type() == device::kFoo) of_tensor = tensor.device();
    });
    if (value.isDevice()) named = value.toDevice();
    if (value.isGenerator()) of_generator = value.toGenerator().device();
  }
  if (named && named->type() == device::kFoo) {
    named = device::with_index(*named);
    device::check_device_index(named->index());
  } else if (named && !named->is_cpu()) {
    named.reset();
  }
  if (of_tensor) return {*of_tensor, named.value_or(*of_tensor)};
  check_generator_device(values);
  const bool is_named = named && named->type() == device::kFoo;
  const bool has_generator = of_generator && of_generator->type() == device::kFoo;
  if (is_named && !has_generator) return {c10::kCPU, *named};
  const c10::Device device = is_named        ? *named
                             : has_generator ? *of_generator
                                             : c10::Device(device::kFoo, device::current_device());
  return {device, device};
}

void check_device(const at::Tensor& tensor, const c10::Argument& argument, c10::Device expected,
                  const c10::OperatorHandle& op) {
  if (tensor.device() == expected) return;
  if (is_optional_tensor_list(*argument.type())) {
    TORCH_CHECK(tensor.is_cpu(),
                "indices should be either on cpu or on the same device as the indexed tensor (",
                expected, ")");
    return;
  }
  const bool is_host_scalar = tensor.is_cpu() && tensor.dim() == 0 && !is_written(argument);
  if (is_host_scalar) return;
  // Sizes of nested tensors are on the CPU for every device.
  if (tensor.is_cpu() && argument.name() == "cpu_nested_shape_example") return;
  // TensorIterator's message on other devices.
  TORCH_CHECK(!op.hasTag(at::Tag::pointwise) || argument.kwarg_only(),
              "Expected all tensors to be on the same device, but found at least two devices, ",
              expected, " and ", tensor.device(), "!");
  c10::impl::common_device_check_failure(expected, tensor, op.schema().name().c_str(),
                                         argument.name().c_str());
}

// Returns the device of the indexed tensor, which is first, or of the first one on foo.
c10::Device expected_device(const c10::OperatorHandle& op, at::ArrayRef<IValue> values,
                            c10::Device foo) {
  const auto& arguments = op.schema().arguments();
  const bool is_indexing = std::any_of(
      arguments.begin(), arguments.end(),
      [](const c10::Argument& argument) { return is_optional_tensor_list(*argument.type()); });
  return is_indexing && values[0].isTensor() ? values[0].toTensor().device() : foo;
}

void check_arguments(const c10::OperatorHandle& op, at::ArrayRef<IValue> values, c10::Device foo) {
  const auto& arguments = op.schema().arguments();
  const c10::Device expected = expected_device(op, values, foo);
  for (size_t position = 0; position < values.size(); ++position) {
    const IValue& value = values[position];
    const c10::Argument& argument = arguments[position];
    for_each_tensor(
        value, [&](const at::Tensor& tensor) { check_device(tensor, argument, expected, op); });
    TORCH_CHECK(!(value.isBool() && value.toBool() && argument.name() == "pin_memory"),
                "Only dense CPU tensors can be pinned");
    TORCH_CHECK_NOT_IMPLEMENTED(!value.isStorage() && !value.isStream(), op.schema().name(),
                                ": argument ", argument.name(), " of type ", argument.type()->str(),
                                " is not supported on foo");
  }
}

bool takes_generator(const c10::FunctionSchema& schema) {
  for (const c10::Argument& argument : schema.arguments()) {
    if (is_optional_generator(*argument.type())) return true;
  }
  return false;
}

void replace_argument(IValue& value, const c10::Argument& argument, HostCall& call,
                      c10::Device device) {
  if (value.isDevice()) {
    // The CPU's kernel serves other devices, such as meta, as they are.
    if (value.toDevice().type() == device::kFoo) value = c10::Device(c10::kCPU);
  } else if (value.isGenerator()) {
    value = device::host_generator(value.toGenerator());
  } else if (value.isNone() && is_optional_generator(*argument.type())) {
    value = device::host_generator(device::default_generator(device.index()));
  } else {
    replace_tensors(value, [&](const at::Tensor& tensor) { return call.to_host(tensor); });
  }
}

// These operators have the tag nondeterministic_seeded, but their CPU kernels draw nothing.
bool draws_nothing(const c10::OperatorName& name) {
  return name.name == "aten::_fused_sdp_choice" ||
         name.name == "aten::_nested_tensor_softmax_with_shape" ||
         name.name == "aten::_scaled_dot_product_flash_attention_for_cpu";
}

// Otherwise the kernel would draw from the CPU's default generator, which foo must not change.
void check_randomness(const c10::OperatorHandle& op) {
  const bool has_generator_of_foo =
      !op.hasTag(at::Tag::nondeterministic_seeded) || takes_generator(op.schema());
  TORCH_CHECK_NOT_IMPLEMENTED(has_generator_of_foo || draws_nothing(op.operator_name()),
                              op.operator_name(),
                              " draws random numbers and takes no generator, so its kernel for cpu "
                              "cannot run on foo: register a kernel for foo");
}

void call_host_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                      torch::jit::Stack* stack) {
  if (!op.hasComputedKernelForDispatchKey(keys.highestPriorityTypeId())) {
    const std::string instead = instead_of(op.operator_name());
    C10_THROW_ERROR(NotImplementedError,
                    c10::str(op.operator_name(),
                             " has no kernel for foo, and none for cpu that could run instead",
                             instead.empty() ? "" : ": use ", instead));
  }
  check_randomness(op);
  count_fallback(op);
  op.redispatchBoxed(keys, stack);
}

void call_unobserved(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                     torch::jit::Stack* stack, HostKernel* own) {
  const auto& arguments = op.schema().arguments();
  const size_t first = stack->size() - arguments.size();
  const auto [device, result_device] = devices_of_call(torch::jit::last(*stack, arguments.size()));
  check_arguments(op, torch::jit::last(*stack, arguments.size()), device);
  if (device::reports_synchronization() &&
      ImplicitSynchronization(op).is_there(torch::jit::last(*stack, arguments.size()))) {
    device::report_synchronization(op.schema().name());
  }

  HostCall call(device, result_device);
  for (size_t position = 0; position < arguments.size(); ++position) {
    replace_argument((*stack)[first + position], arguments[position], call, call.device());
  }
  try {
    if (own != nullptr && own(op, *stack)) {
      count_own(op);
    } else {
      call_host_kernel(op, host_keys(keys), stack);
    }
  } catch (...) {
    // As on the CPU, a kernel may have resized `out` before it raises an error.
    call.write_back();
    throw;
  }
  call.write_back();
  for (size_t position = first; position < stack->size(); ++position) {
    replace_tensors((*stack)[position],
                    [&](const at::Tensor& tensor) { return call.to_foo(tensor); });
  }
}

// Kinds of foo tensors, each with its counterpart on the CPU.
constexpr std::pair<c10::DispatchKey, c10::DispatchKey> kKindsOfTensors[] = {
    {c10::DispatchKey::PrivateUse1, c10::DispatchKey::CPU},
    {c10::DispatchKey::QuantizedPrivateUse1, c10::DispatchKey::QuantizedCPU},
    {c10::DispatchKey::SparsePrivateUse1, c10::DispatchKey::SparseCPU},
    {c10::DispatchKey::SparseCsrPrivateUse1, c10::DispatchKey::SparseCsrCPU},
    {c10::DispatchKey::NestedTensorPrivateUse1, c10::DispatchKey::NestedTensorCPU},
};

bool has_composite_kernel(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
         op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional) ||
         op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) ||
         op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutogradNestedTensor);
}

// Whether a call may be for foo although none of its arguments is a tensor of foo.
bool chooses_device(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(c10::DispatchKey::BackendSelect);
}

// Sends a _foreach_ operator to the CPU as a whole. torch would call an operator for each tensor,
// and each would come here separately.
class ForEach final : public c10::OperatorKernel {
 public:
  explicit ForEach(c10::SafeKernelFunction one_by_one) : one_by_one_(std::move(one_by_one)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack) {
    if (are_on_one_device(torch::jit::last(*stack, op.schema().arguments().size()))) {
      call_on_host(op, keys, stack);
    } else {
      one_by_one_.callBoxed(op, keys, stack);
    }
  }

 private:
  static bool are_on_one_device(at::ArrayRef<IValue> arguments) {
    std::optional<c10::Device> first;
    bool result = true;
    for (const IValue& argument : arguments) {
      for_each_tensor(argument, [&](const at::Tensor& tensor) {
        if (!first) first = tensor.device();
        result &= tensor.device() == *first;
      });
    }
    return result;
  }

  c10::SafeKernelFunction one_by_one_;
};

bool is_for_each(const c10::OperatorName& name) {
  return name.name.starts_with("aten::_foreach_");
}

}  // namespace

c10::DispatchKeySet host_keys(c10::DispatchKeySet keys) {
  // Python's dispatcher leaves keys that have already run in the set.
  constexpr c10::DispatchKeySet kKinds =
      c10::DispatchKeySet({c10::DispatchKey::Dense, c10::DispatchKey::Quantized,
                           c10::DispatchKey::Sparse, c10::DispatchKey::SparseCsr,
                           c10::DispatchKey::NestedTensor}) |
      c10::DispatchKeySet(c10::DispatchKeySet::RAW, c10::full_backend_mask);
  const auto kind = c10::toFunctionalityKey((keys & kKinds).highestPriorityTypeId());
  return c10::DispatchKeySet(
      c10::toRuntimePerBackendFunctionalityKey(kind, c10::BackendComponent::CPUBit));
}

void call_on_host(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack) {
  call_on_host(op, keys, stack, nullptr);
}

void call_on_host(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack,
                  HostKernel* own) {
  observe_operator(op, stack, [&] { call_unobserved(op, keys, stack, own); });
}

void register_host_kernels(c10::ArrayRef<c10::OperatorHandle> operators) {
  for (const c10::OperatorHandle& op : operators) {
    const c10::OperatorName& name = op.operator_name();
    if (!has_composite_kernel(op) && !chooses_device(op)) continue;
    if (is_for_each(name)) {
      auto one_by_one = op.getComputedKernelForDispatchKey(c10::DispatchKey::PrivateUse1);
      register_kernel(c10::toString(name), c10::DispatchKey::PrivateUse1,
                      c10::KernelFunction::makeFromBoxedFunctor(
                          std::make_unique<ForEach>(std::move(one_by_one))));
    }
    for (const auto& [foo_key, host_key] : kKindsOfTensors) {
      if (!op.hasKernelForDispatchKey(host_key) || op.hasKernelForDispatchKey(foo_key)) continue;
      register_kernel(c10::toString(name), foo_key,
                      c10::KernelFunction::makeFromBoxedFunction<&call_on_host>());
    }
  }
}

// These composites look up a kernel in a table of torch's own devices.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  for (const char* name : {"_validate_sparse_coo_tensor_args", "conj_physical_", "mode.values"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&call_on_host>());
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&call_on_host>());
}

namespace {

// Registers the fallbacks of the other kinds of tensors. Each takes milliseconds, since torch then
// visits all of its operators, and most programs import torch without making a tensor of foo.
void register_other_fallbacks() {
  // Never destroyed: at exit the dispatcher may be gone already.
  static auto* registrations = new std::vector<c10::RegistrationHandleRAII>();
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& [foo_key, host_key] : kKindsOfTensors) {
    // Registered already: the dense one, or a user's.
    if (dispatcher.hasBackendFallbackForDispatchKey(foo_key)) continue;
    registrations->push_back(dispatcher.registerFallback(
        foo_key, c10::KernelFunction::makeFromBoxedFunction<&call_on_host>(), "foo_ops"));
  }
}

const bool registered = [] {
  device::before_first_use = &register_other_fallbacks;
  return true;
}();

}  // namespace

namespace {

// Keyed by prefixes of names; the first match counts.
constexpr std::pair<std::string_view, std::string_view> kInstead[] = {
    {"_conv_depthwise2d", "torch.nn.functional.conv2d with groups"},
    {"_convert_weight_to_int4pack_for_cpu", "torch.ops.aten._convert_weight_to_int4pack"},
    {"_cslt_", "torch.nn.functional.linear of the dense weight"},
    {"_cudnn_ctc_loss", "torch.nn.functional.ctc_loss"},
    {"_cudnn_init_dropout_state", "torch.nn.LSTM or torch.nn.GRU"},
    {"_cudnn_rnn", "torch.nn.LSTM or torch.nn.GRU"},
    {"_fill_mem_eff_dropout_mask_", "torch.Tensor.bernoulli_"},
    {"_flash_attention_forward", "torch.nn.functional.scaled_dot_product_attention in bfloat16"},
    {"_mixed_dtypes_linear", "foo_ops.linear_int8 or foo_ops.linear_int4"},
    {"_philox_", "a torch.Generator of the device"},
    {"_scaled_dot_product_cudnn_attention", "torch.nn.functional.scaled_dot_product_attention"},
    {"_scaled_dot_product_efficient_attention", "torch.nn.functional.scaled_dot_product_attention"},
    {"_scaled_dot_product_flash_attention",
     "torch.nn.functional.scaled_dot_product_attention in bfloat16"},
    {"_sparse_semi_structured_", "torch.nn.functional.linear of the dense weight"},
    {"_spsolve", "torch.linalg.solve of dense tensors"},
    {"_to_sparse_semi_structured", "the dense tensor"},
    {"_triton_multi_head_attention", "torch.nn.MultiheadAttention"},
    {"_triton_scaled_dot_attention", "torch.nn.functional.scaled_dot_product_attention"},
    {"baddbmm", "dense tensors"},
    {"bmm", "dense tensors"},
    {"conv_depthwise3d", "torch.nn.functional.conv3d with groups"},
    {"cudnn_affine_grid_generator", "torch.nn.functional.affine_grid"},
    {"cudnn_batch_norm", "torch.nn.functional.batch_norm"},
    {"cudnn_convolution", "torch.nn.functional.conv2d and its kind"},
    {"cudnn_grid_sampler", "torch.nn.functional.grid_sample"},
    {"miopen_batch_norm", "torch.nn.functional.batch_norm"},
    {"miopen_convolution", "torch.nn.functional.conv2d and its kind"},
    {"miopen_ctc_loss", "torch.nn.functional.ctc_loss"},
    {"miopen_depthwise_convolution", "torch.nn.functional.conv2d with groups"},
    {"miopen_rnn", "torch.nn.LSTM or torch.nn.GRU"},
};

// torch queries whether CUDA's libraries for losses can be used.
bool is_used(const at::Tensor&, const at::Tensor&, at::IntArrayRef, at::IntArrayRef, int64_t) {
  return false;
}

bool is_used_by_lengths(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                        int64_t) {
  return false;
}

}  // namespace

std::string instead_of(const c10::OperatorName& name) {
  std::string_view base = name.name;
  if (!base.starts_with("aten::")) return "";
  base.remove_prefix(6);
  for (const auto& [beginning, instead] : kInstead) {
    if (base.starts_with(beginning)) return std::string(instead);
  }
  return "";
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  register_own_kernel<"aten::_use_cudnn_ctc_loss", &is_used, Devices::kAny>(library);
  register_own_kernel<"aten::_use_cudnn_ctc_loss.Tensor", &is_used_by_lengths, Devices::kAny>(
      library);
  register_own_kernel<"aten::_use_miopen_ctc_loss", &is_used, Devices::kAny>(library);
  register_own_kernel<"aten::_use_miopen_ctc_loss.Tensor", &is_used_by_lengths, Devices::kAny>(
      library);
}

}  // namespace foo::aten
