// Dtypes that an operator has on CUDA but not on the CPU: computes on copies in a wider dtype and
// rounds the results once. The conformance tests compare all operators that PyTorch lists.

#include <ATen/MemoryOverlap.h>
#include <ATen/OpMathType.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TypeProperties.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "aten/aten.h"
#include "aten/fallback.h"
#include "aten/layouts.h"
#include "aten/operator_kinds.h"
#include "launch/registration.h"

namespace foo::aten {
namespace {

using at::ScalarType;
using at::Tensor;
using c10::IValue;

// A dtype of arguments and results, and the wider one that a kernel computes in.
struct Widening {
  ScalarType narrow, wide;
};

constexpr Widening kFloat16[] = {{at::kHalf, at::kFloat}, {at::kComplexHalf, at::kComplexFloat}};
constexpr Widening kBfloat16[] = {{at::kBFloat16, at::kFloat}};
constexpr Widening kBoolean[] = {{at::kBool, at::kByte}};

// Returns the widenings that apply if this is an operator's common dtype.
at::ArrayRef<Widening> widenings(ScalarType common) {
  if (common == at::kBool) return kBoolean;
  if (common == at::kBFloat16) return kBfloat16;
  return kFloat16;
}

ScalarType widened(ScalarType dtype, at::ArrayRef<Widening> all) {
  for (const auto [narrow, wide] : all) {
    if (dtype == narrow) return wide;
  }
  return dtype;
}

ScalarType narrowed(ScalarType dtype, at::ArrayRef<Widening> all) {
  for (const auto [narrow, wide] : all) {
    if (dtype == wide) return narrow;
  }
  return dtype;
}

bool is_result(const c10::Argument& argument) {
  return is_written(argument) && argument.kwarg_only();
}

bool is_dtype(const c10::Argument& argument, const IValue& value) {
  return value.isInt() && argument.name() == "dtype";
}

// Returns the dtype in which the CPU's kernel would compute.
ScalarType common_dtype(const c10::FunctionSchema& schema, at::ArrayRef<IValue> values) {
  at::native::ResultTypeState state = {};
  for (size_t position = 0; position < values.size(); ++position) {
    const c10::Argument& argument = schema.arguments()[position];
    const IValue& value = values[position];
    if (is_dtype(argument, value)) return value.toScalarType();
    if (is_result(argument)) continue;
    for_each_tensor(value, [&](const Tensor& tensor) {
      state = at::native::update_result_type_state(tensor, state);
    });
    if (value.isScalar() && argument.real_type()->kind() == c10::TypeKind::NumberType) {
      state = at::native::update_result_type_state(value.toScalar(), state);
    }
  }
  return at::native::result_type(state);
}

// A cheap test first: most calls have none of these dtypes.
template <ScalarType... dtypes>
bool may_be_widened(const c10::FunctionSchema& schema, at::ArrayRef<IValue> values) {
  constexpr bool has_complex = ((dtypes == at::kComplexHalf) || ...);
  const auto is_one = [](ScalarType dtype) {
    return ((dtype == dtypes) || ...) || (has_complex && dtype == at::kHalf);
  };
  bool result = false;
  for (size_t position = 0; position < values.size(); ++position) {
    const IValue& value = values[position];
    for_each_tensor(value, [&](const Tensor& tensor) { result |= is_one(tensor.scalar_type()); });
    result |= is_dtype(schema.arguments()[position], value) && is_one(value.toScalarType());
  }
  return result;
}

// Views the elements from the first to the last, in memory order.
Tensor elements(const Tensor& tensor) {
  int64_t extent = tensor.numel() > 0 ? 1 : 0;
  for (int64_t i = 0; i < tensor.dim() && extent > 0; ++i) {
    extent += (tensor.size(i) - 1) * tensor.stride(i);
  }
  return tensor.as_strided({extent}, {1}, tensor.storage_offset());
}

// Copies to another dtype with the same strides, since results take the arguments' layout.
Tensor copy_in(ScalarType dtype, const Tensor& tensor) {
  return elements(tensor).to(dtype).as_strided(tensor.sizes(), tensor.strides(), 0);
}

// Arguments of a call, with narrow dtypes replaced by copies in wide ones.
class WideArguments {
 public:
  explicit WideArguments(at::ArrayRef<Widening> all) : widenings_(all) {}

  void replace(IValue& value, const c10::Argument& argument) {
    if (is_dtype(argument, value)) value = widened(value.toScalarType(), widenings_);
    replace_tensors(value, [&](const Tensor& tensor) { return wide(tensor, argument); });
  }

  // Call this when all arguments are replaced.
  void check_overlap() const {
    for (const auto& [narrow, wide, is_written] : tensors_) {
      if (!is_written) continue;
      at::assert_no_internal_overlap(narrow);
      for (const auto& other : tensors_) at::assert_no_partial_overlap(narrow, other.narrow);
    }
  }

  void write_back() const {
    for (const auto& [narrow, wide, is_written] : tensors_) {
      if (!is_written || narrow.is_same(wide)) continue;
      if (narrow.sizes() != wide.sizes()) {
        narrow.resize_(wide.sizes());
        narrow.as_strided_(wide.sizes(), wide.strides());
      }
      narrow.copy_(wide);
    }
  }

  // Returns the result of the call in its dtype: a written argument, or a new tensor.
  Tensor result(const Tensor& result) const {
    for (const auto& [narrow, wide, is_written] : tensors_) {
      if (wide.is_same(result)) return narrow;
    }
    return result.to(narrowed(result.scalar_type(), widenings_));
  }

 private:
  struct Pair {
    Tensor narrow, wide;
    bool is_written;
  };

  Tensor wide(const Tensor& tensor, const c10::Argument& argument) {
    const ScalarType dtype = widened(tensor.scalar_type(), widenings_);
    Tensor copy = dtype == tensor.scalar_type() ? tensor : copy_in(dtype, tensor);
    tensors_.push_back({tensor, copy, is_written(argument)});
    return copy;
  }

  at::ArrayRef<Widening> widenings_;
  std::vector<Pair> tensors_;
};

bool are_dense(at::ArrayRef<IValue> values) {
  bool result = true;
  for (const IValue& value : values) {
    for_each_tensor(value, [&](const Tensor& tensor) { result &= is_dense(tensor); });
  }
  return result;
}

// Computes the operator in a wider dtype if its common dtype is one of these.
template <ScalarType... dtypes>
bool compute_wider(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const c10::FunctionSchema& schema = op.schema();
  const size_t count = schema.arguments().size();
  const auto values = torch::jit::last(stack, count);
  if (!may_be_widened<dtypes...>(schema, values) || !are_dense(values)) return false;
  const ScalarType common = common_dtype(schema, values);
  if (((common != dtypes) && ...)) return false;

  WideArguments wide(widenings(common));
  const size_t first = stack.size() - count;
  for (size_t i = 0; i < count; ++i) wide.replace(stack[first + i], schema.arguments()[i]);
  wide.check_overlap();
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
  wide.write_back();
  for (size_t i = first; i < stack.size(); ++i) {
    replace_tensors(stack[i], [&](const Tensor& tensor) { return wide.result(tensor); });
  }
  return true;
}

// Replaces the arguments on the stack by the result, which is written to `out` if the last argument
// is one.
void finish(const c10::OperatorHandle& op, torch::jit::Stack& stack, Tensor result) {
  const auto& arguments = op.schema().arguments();
  if (is_result(arguments.back())) {
    const Tensor out = stack.back().toTensor();
    TORCH_CHECK(c10::canCast(result.scalar_type(), out.scalar_type()), "result type ",
                result.scalar_type(), " can't be cast to the desired output type ",
                out.scalar_type());
    at::native::resize_output(out, result.sizes());
    out.copy_(result);
    result = out;
  }
  torch::jit::drop(stack, arguments.size());
  stack.emplace_back(std::move(result));
}

// Counts values in bins of equal width, exact for all integers: the bin of a value is (value -
// least) * bins / (most - least), rounded down.
Tensor count_in_bins(const Tensor& values, int64_t bins, int64_t least, int64_t most) {
  Tensor counts = at::zeros({bins}, values.options());
  auto* count = counts.mutable_data_ptr<int64_t>();
  const auto* value = values.const_data_ptr<int64_t>();
  const __int128 width = static_cast<__int128>(most) - least;
  for (const auto* end = value + values.numel(); value != end; ++value) {
    if (*value < least || *value > most) continue;
    const __int128 distance = static_cast<__int128>(*value) - least;
    ++count[std::min<int64_t>(static_cast<int64_t>(distance * bins / width), bins - 1)];
  }
  return counts;
}

bool is_integral(const Tensor& tensor) {
  return c10::isIntegralType(tensor.scalar_type(), /*includeBool=*/false);
}

// Computes histc of integers. As on CUDA, counts have the dtype of the input and wrap around.
bool count_integers(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const auto values = torch::jit::last(stack, op.schema().arguments().size());
  const Tensor& self = values[0].toTensor();
  if (!is_dense(self) || !is_integral(self)) return false;
  const int64_t bins = values[1].toInt();
  TORCH_CHECK(bins > 0, "bins must be > 0");
  const Tensor input = self.to(at::kLong).contiguous();
  int64_t least = values[2].toScalar().toLong(), most = values[3].toScalar().toLong();
  if (least == most && input.numel() > 0) {
    least = input.min().item<int64_t>();
    most = input.max().item<int64_t>();
  }
  if (least == most) {
    --least;
    ++most;
  }
  TORCH_CHECK(least < most, "max must be larger than min");
  finish(op, stack, count_in_bins(input, bins, least, most).to(self.scalar_type()));
  return true;
}

// Computes nansum of complex numbers; a number with a NaN in either part counts as zero.
bool sum_complex_numbers(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const auto values = torch::jit::last(stack, op.schema().arguments().size());
  const Tensor& self = values[0].toTensor();
  if (!is_dense(self) || !self.is_complex()) return false;
  const auto dtype = values[3].toOptional<ScalarType>().value_or(self.scalar_type());
  const Tensor wide = self.to(widened(self.scalar_type(), kFloat16));
  const auto dim = values[1].toOptional<std::vector<int64_t>>();
  const Tensor sum = wide.masked_fill(at::isnan(wide), 0)
                         .sum(dim ? at::OptionalIntArrayRef(*dim) : std::nullopt,
                              values[2].toBool(), widened(dtype, kFloat16));
  finish(op, stack, sum.to(dtype));
  return true;
}

struct Rule {
  HostKernel* kernel;
  // Separated by spaces.
  const char* operators;
};

const Rule kRules[] = {
    {&compute_wider<at::kComplexHalf>,
     "acos acosh angle asin asinh atan atanh cos cosh cumprod div equal exp lerp log logaddexp pow "
     "prod rsqrt sigmoid sigmoid_backward sin sinh sqrt sum tan tanh tanh_backward"},
    {&compute_wider<at::kBool>, "abs"},
    {&compute_wider<at::kComplexHalf, at::kBool>, "trace"},
    {&compute_wider<at::kComplexHalf, at::kHalf>, "_fft_c2c _fft_c2r _fft_r2c"},
    {&compute_wider<at::kHalf>, "polygamma round rrelu_with_noise"},
    {&compute_wider<at::kHalf, at::kBFloat16>,
     "_upsample_bilinear2d_aa _upsample_bilinear2d_aa_backward avg_pool3d avg_pool3d_backward "
     "multi_margin_loss multi_margin_loss_backward multilabel_margin_loss_forward "
     "multilabel_margin_loss_backward"},
    {&count_integers, "histc"},
    {&sum_complex_numbers, "nansum"},
};

// Returns the kernels by names such as "aten::sin" and "aten::sin_"; overloads such as sin.out have
// the same kernels.
std::unordered_map<std::string, HostKernel*> kernels_by_name() {
  std::unordered_map<std::string, HostKernel*> kernels;
  for (const Rule& rule : kRules) {
    std::istringstream names(rule.operators);
    for (std::string name; names >> name;) {
      kernels["aten::" + name] = kernels["aten::" + name + "_"] = rule.kernel;
    }
  }
  return kernels;
}

class WiderKernel final : public c10::OperatorKernel {
 public:
  explicit WiderKernel(HostKernel* kernel) : kernel_(kernel) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack) {
    call_on_host(op, keys, stack, kernel_);
  }

 private:
  HostKernel* kernel_;
};

}  // namespace

void register_wider_kernels(c10::ArrayRef<c10::OperatorHandle> operators) {
  const auto kernels = kernels_by_name();
  for (const c10::OperatorHandle& op : operators) {
    const auto known = kernels.find(op.operator_name().name);
    if (known == kernels.end() || !op.hasKernelForDispatchKey(c10::DispatchKey::CPU)) continue;
    register_kernel(
        c10::toString(op.operator_name()), c10::DispatchKey::PrivateUse1,
        c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<WiderKernel>(known->second)));
  }
}

namespace {

using at::Tensor;
using c10::IValue;

// A Fourier transform of torch.fft in half precision, which torch has only for CUDA: computes in
// float32, below the gradients.
class HalfTransform final : public c10::OperatorKernel {
 public:
  explicit HalfTransform(c10::SafeKernelFunction of_torch) : of_torch_(std::move(of_torch)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack) {
    IValue& self = (*stack)[stack->size() - op.schema().arguments().size()];
    const at::ScalarType dtype = self.toTensor().scalar_type();
    if (dtype != at::kHalf && dtype != at::kComplexHalf) {
      of_torch_.callBoxed(op, keys, stack);
      return;
    }
    self = self.toTensor().to(at::toOpMathType(dtype));
    if (!op.schema().arguments().back().is_out()) {
      op.callBoxed(stack);
      stack->back() = narrow(stack->back().toTensor());
      return;
    }
    const Tensor out = stack->back().toTensor();
    stack->pop_back();
    c10::Dispatcher::singleton()
        .findSchemaOrThrow(op.operator_name().name.c_str(), "")
        .callBoxed(stack);
    const Tensor result = narrow(stack->back().toTensor());
    at::native::resize_output(out, result.sizes());
    stack->back() = out.copy_(result);
  }

 private:
  static Tensor narrow(const Tensor& result) {
    return result.to(result.is_complex() ? at::kComplexHalf : at::kHalf);
  }

  c10::SafeKernelFunction of_torch_;
};

// Whether the operator is a transform along dimensions, such as aten::fft_rfft2.out.
bool is_transform(const c10::OperatorHandle& op) {
  std::string_view name = op.operator_name().name;
  if (!name.starts_with("aten::fft_")) return false;
  const auto& arguments = op.schema().arguments();
  return std::any_of(arguments.begin(), arguments.end(),
                     [](const c10::Argument& argument) { return argument.name() == "norm"; });
}

void register_transform(const c10::OperatorHandle& op) {
  for (const auto key : {c10::DispatchKey::AutogradPrivateUse1, c10::DispatchKey::PrivateUse1}) {
    auto of_torch = op.getComputedKernelForDispatchKey(key);
    register_kernel(c10::toString(op.operator_name()), key,
                    c10::KernelFunction::makeFromBoxedFunctor(
                        std::make_unique<HalfTransform>(std::move(of_torch))));
  }
}

}  // namespace

void register_half_transforms(c10::ArrayRef<c10::OperatorHandle> operators) {
  for (const c10::OperatorHandle& op : operators) {
    if (is_transform(op)) register_transform(op);
  }
}

}  // namespace foo::aten
