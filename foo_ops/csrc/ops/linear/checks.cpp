#include "ops/linear/checks.h"

#include <c10/util/Exception.h>

#include "launch/kernel_table.h"
#include "launch/symbols.h"

namespace foo {

void check_dtype(const char* name, const char* argument, const at::Tensor& tensor) {
  const auto dtype = tensor.scalar_type();
  TORCH_CHECK_TYPE(
      dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf || dtype == at::kBFloat16,
      name, ": ", argument, " must be float16, bfloat16, float32 or float64, got ",
      dtype_name(dtype));
}

void check_rows(const char* name, const char* argument, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.dim() >= 1, name, ": ", argument,
                    " must have at least 1 dimension, got 0");
}

void check_dimensions(const char* name, const char* argument, const at::Tensor& tensor,
                      int64_t dimensions, const char* shape) {
  TORCH_CHECK_VALUE(tensor.dim() == dimensions, name, ": ", argument, " must have ", dimensions,
                    dimensions == 1 ? " dimension " : " dimensions ", shape, ", got ",
                    tensor.dim());
}

void check_like(const char* name, const char* argument, const at::Tensor& tensor, const char* of,
                const at::Tensor& like) {
  TORCH_CHECK_VALUE(tensor.device() == like.device(), name, ": ", argument, " must be on ",
                    like.device(), " as ", of, " is, got ", tensor.device());
  TORCH_CHECK_TYPE(tensor.scalar_type() == like.scalar_type(), name, ": ", argument, " must be ",
                   dtype_name(like.scalar_type()), " as ", of, " is, got ",
                   dtype_name(tensor.scalar_type()));
}

void check_count(const char* name, const char* argument, const char* what, const c10::SymInt& size,
                 const c10::SymInt& expected, const char* as) {
  TORCH_CHECK_VALUE(holds(size.sym_eq(expected)), name, ": ", argument, " must have ", expected,
                    " ", what, " as ", as, ", got ", size);
}

}  // namespace foo
