// torch.autocast("foo"), with CUDA's lists of operators.

#include <ATen/autocast_mode.h>
#include <torch/library.h>
#include <torch/version.h>

namespace foo::aten {
namespace {

using at::IntArrayRef;
using at::Scalar;
using at::ScalarType;
using at::Tensor;

// CUDA's autocast kernel of binary_cross_entropy only raises, with advice.
void refuse_as_cuda(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  op.callBoxedForDispatchKey(c10::DispatchKey::AutocastCUDA, *stack);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

// The library's variable must have the name that torch's macros use.
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
  AT_FORALL_LOWER_PRECISION_FP(LOWER_PRECISION)
#undef LOWER_PRECISION

#define FLOAT32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_FP32(FLOAT32)
#if TORCH_VERSION_MINOR >= 14
  // Not in torch's list for all devices.
  FLOAT32(linalg_matrix_sqrth)
#endif
#undef FLOAT32

#define FLOAT32_UNLESS_SET(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
  AT_FORALL_FP32_SET_OPT_DTYPE(FLOAT32_UNLESS_SET)
#undef FLOAT32_UNLESS_SET

  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)

#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_PROMOTE(PROMOTE)
#undef PROMOTE

  m.impl("binary_cross_entropy", torch::CppFunction::makeFromBoxedFunction<&refuse_as_cuda>());
}

}  // namespace
}  // namespace foo::aten
