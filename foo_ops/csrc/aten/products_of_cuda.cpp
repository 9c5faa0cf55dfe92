// Matrix products that torch has only for CUDA: with another dtype of the result, of groups of
// rows, and of weights in four bits. They are composed of foo's matrix products.

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_grouped_mm_compositeexplicitautograd_dispatch.h>

#include <algorithm>
#include <vector>

#include "aten/attention_operators.h"
#include "launch/registration.h"

namespace foo::aten {
namespace {

using at::Scalar;
using at::ScalarType;
using at::Tensor;

// --------------------------------------------------------------------- another dtype of the result

// A product of two 16-bit numbers is exact in float32.
void check_out_dtype(const char* name, const Tensor& self, const Tensor& other, ScalarType dtype) {
  const ScalarType given = self.scalar_type();
  TORCH_CHECK_TYPE(other.scalar_type() == given, name, ": mat2 must be of dtype ", given,
                   " as the other matrix is, got ", other.scalar_type());
  const bool is_half = given == at::kHalf || given == at::kBFloat16;
  TORCH_CHECK_TYPE(dtype == given || (is_half && dtype == at::kFloat), name,
                   ": out_dtype must be the dtype of the matrices, or float32 for matrices of "
                   "float16 or bfloat16, got ",
                   dtype, " for ", given);
}

Tensor mm_to(const Tensor& self, const Tensor& mat2, ScalarType dtype) {
  check_out_dtype("mm", self, mat2, dtype);
  return self.to(dtype).mm(mat2.to(dtype));
}

Tensor bmm_to(const Tensor& self, const Tensor& mat2, ScalarType dtype) {
  check_out_dtype("bmm", self, mat2, dtype);
  return self.to(dtype).bmm(mat2.to(dtype));
}

Tensor addmm_to(const Tensor& self, const Tensor& mat1, const Tensor& mat2, ScalarType dtype,
                const Scalar& beta, const Scalar& alpha) {
  check_out_dtype("addmm", mat1, mat2, dtype);
  return at::addmm(self.to(dtype), mat1.to(dtype), mat2.to(dtype), beta, alpha);
}

Tensor baddbmm_to(const Tensor& self, const Tensor& batch1, const Tensor& batch2, ScalarType dtype,
                  const Scalar& beta, const Scalar& alpha) {
  check_out_dtype("baddbmm", batch1, batch2, dtype);
  return at::baddbmm(self.to(dtype), batch1.to(dtype), batch2.to(dtype), beta, alpha);
}

Tensor& write(const Tensor& result, Tensor& out) {
  TORCH_CHECK_TYPE(out.scalar_type() == result.scalar_type(), "out must be of dtype ",
                   result.scalar_type(), " as out_dtype says, got ", out.scalar_type());
  at::native::resize_output(out, result.sizes());
  return out.copy_(result);
}

Tensor& mm_out(const Tensor& self, const Tensor& mat2, ScalarType dtype, Tensor& out) {
  return write(mm_to(self, mat2, dtype), out);
}

Tensor& bmm_out(const Tensor& self, const Tensor& mat2, ScalarType dtype, Tensor& out) {
  return write(bmm_to(self, mat2, dtype), out);
}

Tensor& addmm_out(const Tensor& self, const Tensor& mat1, const Tensor& mat2, ScalarType dtype,
                  const Scalar& beta, const Scalar& alpha, Tensor& out) {
  return write(addmm_to(self, mat1, mat2, dtype, beta, alpha), out);
}

Tensor& baddbmm_out(const Tensor& self, const Tensor& batch1, const Tensor& batch2,
                    ScalarType dtype, const Scalar& beta, const Scalar& alpha, Tensor& out) {
  return write(baddbmm_to(self, batch1, batch2, dtype, beta, alpha), out);
}

// ------------------------------------------------------------------------------------------ groups

// Copies expanded tensors, such as the gradient of a sum: torch's kernel takes no strides of zero.
Tensor with_memory(const Tensor& tensor) {
  const auto strides = tensor.strides();
  return std::find(strides.begin(), strides.end(), 0) == strides.end() ? tensor
                                                                       : tensor.contiguous();
}

Tensor grouped_mm(const Tensor& self, const Tensor& mat2, const OptionalTensor& offs,
                  const OptionalTensor& bias, std::optional<ScalarType> out_dtype) {
  return at::compositeexplicitautograd::_grouped_mm(with_memory(self), with_memory(mat2), offs,
                                                    bias, out_dtype);
}

void check_scale(const char* name, const char* argument, const Tensor& scale,
                 at::IntArrayRef expected) {
  TORCH_CHECK_NOT_IMPLEMENTED(scale.scalar_type() == at::kFloat, name, ": ", argument,
                              " must be of dtype float32, one for each row, on foo, got ",
                              scale.scalar_type());
  TORCH_CHECK_VALUE(scale.sizes() == expected, name, ": ", argument, " must have sizes ", expected,
                    ", got ", scale.sizes());
}

// Returns the group of each row; rows after the last group count to that group.
Tensor groups_of_rows(const Tensor& offs, int64_t rows) {
  const Tensor row = at::arange(rows, offs.options());
  return at::searchsorted(offs, row, /*out_int32=*/false, /*right=*/true)
      .clamp_max(offs.size(0) - 1);
}

// Multiplies in float32, then scales each row of the left matrices and each column of the right
// ones.
Tensor scaled_grouped_mm(const char* name, const Tensor& self, const Tensor& mat2,
                         const Tensor& scale_a, const Tensor& scale_b, const OptionalTensor& offs,
                         ScalarType out_dtype) {
  for (const auto& [argument, matrix] : {std::pair("self", &self), std::pair("mat2", &mat2)}) {
    TORCH_CHECK_TYPE(matrix->scalar_type() == at::kFloat8_e4m3fn, name, ": ", argument,
                     " must be of dtype float8_e4m3fn, got ", matrix->scalar_type());
    TORCH_CHECK_VALUE(matrix->dim() == 2 || matrix->dim() == 3, name, ": ", argument,
                      " must have 2 or 3 dimensions, got ", matrix->dim());
  }
  TORCH_CHECK_VALUE(has_value(offs) == (self.dim() == 2 || mat2.dim() == 2), name,
                    ": offs must be given if self or mat2 has 2 dimensions, and only then, got ",
                    has_value(offs) ? "a tensor" : "None");
  const int64_t rows = self.size(-2), columns = mat2.size(-1);
  const auto product = [&] {
    return at::compositeexplicitautograd::_grouped_mm(self.to(at::kFloat), mat2.to(at::kFloat),
                                                      offs, std::nullopt, at::kFloat);
  };
  Tensor left, right;
  if (self.dim() == 2 && mat2.dim() == 2) {
    const int64_t groups = offs->size(0);
    check_scale(name, "scale_a", scale_a, {groups * rows});
    check_scale(name, "scale_b", scale_b, {groups * columns});
    left = scale_a.view({groups, rows, 1});
    right = scale_b.view({groups, 1, columns});
  } else if (self.dim() == 2) {
    check_scale(name, "scale_a", scale_a, {rows});
    check_scale(name, "scale_b", scale_b, {mat2.size(0), columns});
    left = scale_a.unsqueeze(-1);
    right = scale_b.index_select(0, groups_of_rows(*offs, rows));
  } else if (mat2.dim() == 2) {
    check_scale(name, "scale_a", scale_a, {self.size(0), rows});
    check_scale(name, "scale_b", scale_b, {columns});
    left = scale_a.index_select(0, groups_of_rows(*offs, columns)).t();
    right = scale_b;
  } else {
    check_scale(name, "scale_a", scale_a, {self.size(0), rows});
    check_scale(name, "scale_b", scale_b, {mat2.size(0), columns});
    left = scale_a.unsqueeze(-1);
    right = scale_b.unsqueeze(-2);
  }
  return product().mul_(left).mul_(right).to(out_dtype);
}

void check_no_bias(const char* name, const OptionalTensor& bias) {
  TORCH_CHECK_NOT_IMPLEMENTED(!has_value(bias), name,
                              ": bias must be None as on CUDA, got a tensor");
}

Tensor scaled_grouped_mm_1(const Tensor& self, const Tensor& mat2, const Tensor& scale_a,
                           const Tensor& scale_b, const OptionalTensor& offs,
                           const OptionalTensor& bias, const OptionalTensor& scale_result,
                           std::optional<ScalarType> out_dtype, bool /*use_fast_accum*/) {
  constexpr const char* kName = "_scaled_grouped_mm";
  check_no_bias(kName, bias);
  TORCH_CHECK_NOT_IMPLEMENTED(!has_value(scale_result), kName,
                              ": scale_result must be None as on CUDA, got a tensor");
  return scaled_grouped_mm(kName, self, mat2, scale_a, scale_b, offs,
                           out_dtype.value_or(at::kBFloat16));
}

// at::blas::ScalingType.
constexpr int64_t kRowWise = 1;

Tensor scaled_grouped_mm_2(const Tensor& self, const Tensor& mat2, at::TensorList scale_a,
                           at::IntArrayRef recipe_a, at::IntArrayRef swizzle_a,
                           at::TensorList scale_b, at::IntArrayRef recipe_b,
                           at::IntArrayRef swizzle_b, const OptionalTensor& offs,
                           const OptionalTensor& bias, std::optional<ScalarType> out_dtype,
                           at::IntArrayRef /*contraction_dim*/, bool /*use_fast_accum*/) {
  constexpr const char* kName = "_scaled_grouped_mm_v2";
  check_no_bias(kName, bias);
  const auto is_swizzled = [](int64_t swizzle) { return swizzle != 0; };
  const bool has_scale_of_rows = recipe_a == at::IntArrayRef(kRowWise) &&
                                 recipe_b == at::IntArrayRef(kRowWise) && scale_a.size() == 1 &&
                                 scale_b.size() == 1 &&
                                 std::none_of(swizzle_a.begin(), swizzle_a.end(), is_swizzled) &&
                                 std::none_of(swizzle_b.begin(), swizzle_b.end(), is_swizzled);
  TORCH_CHECK_NOT_IMPLEMENTED(has_scale_of_rows, kName,
                              ": scales must be ScalingType.RowWise without swizzling on foo");
  return scaled_grouped_mm(kName, self, mat2, scale_a[0], scale_b[0], offs,
                           out_dtype.value_or(at::kBFloat16));
}

// ------------------------------------------------------------------------- weights in four bits

// Order of CUDA's kernel, as in files of quantized models. A tile is eight rows and 16 columns of a
// weight; inner_tiles adjacent tiles are stored together. A row's part of two tiles is cut into
// four words: word q has the pairs of columns 2q and 2q + 8 of the first tile, then of the second.
// The first numbers of all pairs are the lower 16 bits of a word.
constexpr int64_t kRows = 8;
constexpr int64_t kColumns = 16;
constexpr int64_t kWordsOfRow = 4;
constexpr int64_t kLanes = kRows * kWordsOfRow;

void check_inner_tiles(const char* name, int64_t inner_tiles) {
  TORCH_CHECK_VALUE(inner_tiles == 2 || inner_tiles == 4 || inner_tiles == 8, name,
                    ": innerKTiles must be 2, 4 or 8, got ", inner_tiles);
}

// Returns the bit positions of the numbers in a word, indexed by (first or second of a pair, tile,
// half of a tile).
Tensor shifts(const Tensor& like) {
  return at::arange(0, 32, 4, like.options().dtype(at::kInt)).view({2, 2, 2});
}

Tensor convert_weight_to_int4pack(const Tensor& self, int64_t inner_tiles) {
  constexpr const char* kName = "_convert_weight_to_int4pack";
  TORCH_CHECK_TYPE(self.scalar_type() == at::kByte, kName, ": self must be of dtype uint8, got ",
                   self.scalar_type());
  TORCH_CHECK_VALUE(self.dim() == 2, kName, ": self must have 2 dimensions, got ", self.dim());
  check_inner_tiles(kName, inner_tiles);
  const int64_t columns = 2 * self.size(1);
  TORCH_CHECK_VALUE(columns % (inner_tiles * kColumns) == 0, kName,
                    ": self must have a multiple of ", inner_tiles * kColumns / 2, " columns, got ",
                    self.size(1));
  const int64_t added = (kRows - self.size(0) % kRows) % kRows;
  const Tensor bytes = at::constant_pad_nd(self.to(at::kInt), {0, 0, 0, added});
  // Dimensions: rows of tiles, row, part of columns, pair of tiles, tile, half, word.
  const Tensor pairs =
      bytes
          .view({-1, kRows, columns / (inner_tiles * kColumns), inner_tiles / 2, 2, 2, kWordsOfRow})
          .permute({0, 2, 1, 6, 3, 4, 5});
  const Tensor numbers = at::stack({pairs.bitwise_right_shift(4), pairs.bitwise_and(15)}, -3);
  return numbers.bitwise_left_shift(shifts(self))
      .sum({-3, -2, -1}, /*keepdim=*/false, at::kInt)
      .view({bytes.size(0) / kRows, columns / (inner_tiles * kColumns), kLanes, inner_tiles / 2});
}

// Returns the numbers 0 to 15 of a packed weight, (outputs, inputs).
Tensor unpack(const Tensor& packed) {
  const Tensor numbers = packed.unsqueeze(-1)
                             .unsqueeze(-1)
                             .unsqueeze(-1)
                             .bitwise_right_shift(shifts(packed))
                             .bitwise_and(15);
  const int64_t pairs = packed.size(3);
  return numbers.view({packed.size(0), packed.size(1), kRows, kWordsOfRow, pairs, 2, 2, 2})
      .permute({0, 2, 1, 4, 6, 7, 3, 5})
      .reshape({packed.size(0) * kRows, packed.size(1) * pairs * 2 * kColumns});
}

Tensor weight_int4pack_mm(const Tensor& self, const Tensor& mat2, int64_t group_size,
                          const Tensor& scales_and_zeros) {
  constexpr const char* kName = "_weight_int4pack_mm";
  TORCH_CHECK_VALUE(self.dim() == 2, kName, ": self must have 2 dimensions, got ", self.dim());
  TORCH_CHECK_TYPE(mat2.scalar_type() == at::kInt, kName,
                   ": mat2 must be of dtype int32, as _convert_weight_to_int4pack makes it, got ",
                   mat2.scalar_type());
  TORCH_CHECK_VALUE(mat2.dim() == 4 && mat2.size(2) == kLanes, kName,
                    ": mat2 must have 4 dimensions, the third of size 32, got sizes ",
                    mat2.sizes());
  check_inner_tiles(kName, 2 * mat2.size(3));
  const int64_t outputs = mat2.size(0) * kRows;
  const int64_t inputs = mat2.size(1) * mat2.size(3) * 2 * kColumns;
  TORCH_CHECK_VALUE(self.size(1) == inputs, kName, ": self must have ", inputs,
                    " columns as mat2 has, got ", self.size(1));
  TORCH_CHECK_VALUE(group_size == 32 || group_size == 64 || group_size == 128 || group_size == 256,
                    kName, ": qGroupSize must be 32, 64, 128 or 256, got ", group_size);
  TORCH_CHECK_VALUE(inputs % group_size == 0, kName, ": qGroupSize must divide ", inputs,
                    " columns, got ", group_size);
  const std::vector<int64_t> expected{inputs / group_size, outputs, 2};
  TORCH_CHECK_VALUE(scales_and_zeros.sizes() == expected, kName,
                    ": qScaleAndZeros must have sizes ", at::IntArrayRef(expected), ", got ",
                    scales_and_zeros.sizes());
  const Tensor factors = scales_and_zeros.to(at::kFloat).transpose(0, 1).unsqueeze(-1);
  const Tensor groups = unpack(mat2).to(at::kFloat).view({outputs, -1, group_size});
  // The numbers 0 to 15 encode -8 to 7, and a zero point is a value.
  const Tensor weight =
      groups.sub_(8).mul_(factors.select(2, 0)).add_(factors.select(2, 1)).view({outputs, inputs});
  return self.to(at::kFloat).mm(weight.t()).to(self.scalar_type());
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  register_own_kernel<"aten::mm.dtype", &mm_to>(library);
  register_own_kernel<"aten::mm.dtype_out", &mm_out>(library);
  register_own_kernel<"aten::bmm.dtype", &bmm_to>(library);
  register_own_kernel<"aten::bmm.dtype_out", &bmm_out>(library);
  register_own_kernel<"aten::addmm.dtype", &addmm_to>(library);
  register_own_kernel<"aten::addmm.dtype_out", &addmm_out>(library);
  register_own_kernel<"aten::baddbmm.dtype", &baddbmm_to>(library);
  register_own_kernel<"aten::baddbmm.dtype_out", &baddbmm_out>(library);
  register_own_kernel<"aten::_grouped_mm", &grouped_mm>(library);
  register_own_kernel<"aten::_scaled_grouped_mm", &scaled_grouped_mm_1>(library);
  register_own_kernel<"aten::_scaled_grouped_mm_v2", &scaled_grouped_mm_2>(library);
  register_own_kernel<"aten::_convert_weight_to_int4pack", &convert_weight_to_int4pack>(library);
  register_own_kernel<"aten::_weight_int4pack_mm", &weight_int4pack_mm>(library);
}

}  // namespace foo::aten
