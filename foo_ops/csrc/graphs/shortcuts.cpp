#include "graphs/shortcuts.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/DimVector.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "launch/lasting.h"

namespace foo::graphs {
namespace {

// Most tokens, and integers such as their positions, that are read one by one.
constexpr int64_t kMost = 16;

// Returns the tensor that a call is given, or nothing.
const at::Tensor* tensor_at(const Argument& argument, const Registers& registers) {
  const auto* const source = std::get_if<Register>(&argument.value);
  return source == nullptr ? nullptr : &registers[source->index];
}

// The same for an integer.
std::optional<int64_t> integer_at(const Argument& argument, int64_t position) {
  if (const auto* const number = std::get_if<Number>(&argument.value)) return number->at(position);
  const auto* const constant = std::get_if<c10::IValue>(&argument.value);
  return constant != nullptr && constant->isInt() ? std::optional(constant->toInt()) : std::nullopt;
}

// Returns where the only result goes, or nothing.
at::Tensor* result_of(const OperatorCall& call, Registers& registers) {
  const auto* const target =
      call.results.size() == 1 ? std::get_if<Register>(&call.results[0]) : nullptr;
  return target == nullptr ? nullptr : &registers[target->index];
}

bool are_integers(const at::Tensor* tensor) {
  return tensor != nullptr && is_dense_on_cpu(*tensor) && tensor->scalar_type() == at::kLong;
}

// Whether they are integers in a few rows.
bool are_few(const at::Tensor* tensor) {
  return tensor != nullptr && are_few_integers(*tensor) && tensor->dim() <= 2;
}

at::Tensor new_integers(at::IntArrayRef sizes) {
  return at::Tensor(at::detail::empty_cpu(sizes, at::kLong));
}

// Calls function(row, first, step, count) for each row of a tensor of up to two dimensions.
template <class Function>
void each_row(const at::Tensor& tensor, const Function& function) {
  const auto* const first = tensor.const_data_ptr<int64_t>();
  const int64_t dims = tensor.dim();
  const int64_t rows = dims == 2 ? tensor.size(0) : 1, count = dims == 0 ? 1 : tensor.size(-1);
  const int64_t step = dims == 0 ? 1 : tensor.stride(-1);
  for (int64_t row = 0; row < rows; ++row) {
    function(row, first + (dims == 2 ? row * tensor.stride(0) : 0), step, count);
  }
}

bool run_slice(const OperatorCall& call, int64_t position, Registers& registers) {
  const at::Tensor* const base = tensor_at(call.arguments[0], registers);
  at::Tensor* const result = result_of(call, registers);
  const auto dim = integer_at(call.arguments[1], position);
  const auto start = integer_at(call.arguments[2], position);
  const auto stop = integer_at(call.arguments[3], position);
  const auto step = integer_at(call.arguments[4], position);
  const bool are_known = base && result && dim && start && stop && step == 1;
  if (!are_known || !is_dense_on_cpu(*base) || *dim < 0 || *dim >= base->dim()) return false;
  const int64_t size = base->size(*dim);
  // Negative numbers count from the end.
  const auto place = [&](int64_t number) {
    return std::clamp<int64_t>(number < 0 ? number + size : number, 0, size);
  };
  const int64_t first = place(*start), last = std::max(first, place(*stop));
  c10::DimVector sizes(base->sizes());
  sizes[*dim] = last - first;
  set_view(*result, *base, sizes, base->strides(),
           base->storage_offset() + first * base->stride(*dim));
  return true;
}

bool run_fill(const OperatorCall& call, int64_t position, Registers& registers) {
  const at::Tensor* const target = tensor_at(call.arguments[0], registers);
  const auto value = integer_at(call.arguments[1], position);
  const bool has_no_result = std::holds_alternative<std::monostate>(call.results[0]);
  if (!has_no_result || !value || !are_integers(target) || target->numel() != 1) return false;
  *target->mutable_data_ptr<int64_t>() = *value;
  return true;
}

// ATen takes 6 us to copy one row, and 17 while the weights of a model pass through the caches.
bool run_embedding(const OperatorCall& call, int64_t, Registers& registers) {
  const at::Tensor* const weight = tensor_at(call.arguments[0], registers);
  const at::Tensor* const indices = tensor_at(call.arguments[1], registers);
  at::Tensor* const result = result_of(call, registers);
  const bool are_known = weight && result && are_integers(indices) && indices->is_contiguous() &&
                         indices->numel() <= kMost && is_dense_on_cpu(*weight) &&
                         weight->dim() == 2 && weight->is_contiguous();
  if (!are_known) return false;
  const int64_t* const index = indices->const_data_ptr<int64_t>();
  const auto is_row = [&](int64_t it) { return 0 <= it && it < weight->size(0); };
  if (!std::all_of(index, index + indices->numel(), is_row)) return false;
  c10::DimVector sizes(indices->sizes());
  sizes.push_back(weight->size(1));
  at::Tensor rows = at::empty(sizes, weight->options());
  const size_t bytes = weight->size(1) * weight->element_size();
  const auto* const from = static_cast<const char*>(weight->const_data_ptr());
  auto* const to = static_cast<char*>(rows.mutable_data_ptr());
  for (int64_t i = 0; i < indices->numel(); ++i) {
    std::memcpy(to + i * bytes, from + index[i] * bytes, bytes);
  }
  *result = std::move(rows);
  return true;
}

// Contiguous copies of a few integers.
bool run_clone(const OperatorCall& call, int64_t, Registers& registers) {
  const at::Tensor* const from = tensor_at(call.arguments[0], registers);
  at::Tensor* const result = result_of(call, registers);
  if (!result || !are_few(from)) return false;
  const auto format = integer_at(call.arguments[1], 0);
  if (format != static_cast<int64_t>(at::MemoryFormat::Contiguous)) return false;
  at::Tensor copy = new_integers(from->sizes());
  auto* to = copy.mutable_data_ptr<int64_t>();
  each_row(*from, [&](int64_t, const int64_t* first, int64_t step, int64_t count) {
    for (int64_t i = 0; i < count; ++i) *to++ = first[i * step];
  });
  *result = std::move(copy);
  return true;
}

// The number that is added to each integer, if it is one.
std::optional<int64_t> addend_at(const Argument& argument, int64_t position) {
  if (const auto* const number = std::get_if<NumberAsTensor>(&argument.value)) {
    return number->number.at(position);
  }
  const auto* const constant = std::get_if<c10::IValue>(&argument.value);
  const bool is_number = constant != nullptr && constant->isTensor() &&
                         are_integers(&constant->toTensor()) && constant->toTensor().dim() == 0;
  if (!is_number) return std::nullopt;
  return *constant->toTensor().const_data_ptr<int64_t>();
}

// Sums of a few integers and others, or a number.
bool run_add(const OperatorCall& call, int64_t position, Registers& registers) {
  const at::Tensor* const left = tensor_at(call.arguments[0], registers);
  const at::Tensor* const right = tensor_at(call.arguments[1], registers);
  at::Tensor* const result = result_of(call, registers);
  const auto number = addend_at(call.arguments[1], position);
  const bool are_alike =
      are_few(right) && are_few(left) && right->sizes() == left->sizes() && right->is_contiguous();
  const bool are_known = result && are_few(left) && left->is_contiguous() &&
                         (number || are_alike) && integer_at(call.arguments[2], position) == 1;
  if (!are_known) return false;
  at::Tensor sum = new_integers(left->sizes());
  auto* const to = sum.mutable_data_ptr<int64_t>();
  const auto* const first = left->const_data_ptr<int64_t>();
  const auto* const second = number ? nullptr : right->const_data_ptr<int64_t>();
  for (int64_t i = 0; i < sum.numel(); ++i) {
    // Overflow wraps around, as in ATen.
    to[i] = static_cast<int64_t>(static_cast<uint64_t>(first[i]) +
                                 static_cast<uint64_t>(number ? *number : second[i]));
  }
  *result = std::move(sum);
  return true;
}

// Matrices of integers side by side, such as the positions of all tokens and the next one's.
bool run_cat(const OperatorCall& call, int64_t position, Registers& registers) {
  const auto* const list = std::get_if<std::vector<Argument>>(&call.arguments[0].value);
  at::Tensor* const result = result_of(call, registers);
  const auto dim = integer_at(call.arguments[1], position);
  if (list == nullptr || list->empty() || !result || (dim != 1 && dim != -1)) return false;
  const at::Tensor* const model = tensor_at(list->front(), registers);
  int64_t columns = 0;
  for (const Argument& each : *list) {
    const at::Tensor* const part = tensor_at(each, registers);
    const bool fits = are_integers(part) && part->dim() == 2 && part->size(0) == model->size(0) &&
                      part->size(0) <= kMost;
    if (!fits) return false;
    columns += part->size(1);
  }
  at::Tensor joined = new_integers({model->size(0), columns});
  auto* to = joined.mutable_data_ptr<int64_t>();
  for (const Argument& each : *list) {
    const at::Tensor& part = *tensor_at(each, registers);
    each_row(part, [&](int64_t row, const int64_t* first, int64_t step, int64_t count) {
      for (int64_t i = 0; i < count; ++i) to[row * columns + i] = first[i * step];
    });
    to += part.size(1);
  }
  *result = std::move(joined);
  return true;
}

}  // namespace

Shortcut shortcut_of(const c10::OperatorName& name) {
  static const std::map<std::pair<std::string, std::string>, Shortcut> known = {
      {{"aten::slice", "Tensor"}, &run_slice},   {{"aten::fill_", "Scalar"}, &run_fill},
      {{"aten::embedding", ""}, &run_embedding}, {{"aten::clone", ""}, &run_clone},
      {{"aten::add", "Tensor"}, &run_add},       {{"aten::cat", ""}, &run_cat},
  };
  const auto found = known.find({name.name, name.overload_name});
  return found == known.end() ? nullptr : found->second;
}

bool are_few_integers(const at::Tensor& tensor) {
  return are_integers(&tensor) && 0 < tensor.numel() && tensor.numel() <= kMost;
}

bool makes_view(const OperatorCall& call) {
  return call.shortcut == &run_slice;
}

void set_view(at::Tensor& result, const at::Tensor& base, at::IntArrayRef sizes,
              at::IntArrayRef strides, int64_t offset) {
  const bool can_reuse = result.defined() && result.use_count() == 1 &&
                         result.key_set() == base.key_set() && result.dtype() == base.dtype();
  if (can_reuse) {
    result.unsafeGetTensorImpl()->set_storage_keep_dtype(base.storage());
  } else {
    result = at::detail::make_tensor<c10::TensorImpl>(
        c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), base.dtype());
  }
  result.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
}

void release_view(at::Tensor& view) {
  static const auto* const kNoMemory =
      new c10::Storage(c10::Storage::use_byte_size_t(), 0, c10::GetCPUAllocator());
  if (view.defined() && view.use_count() == 1) {
    view.unsafeGetTensorImpl()->set_storage_keep_dtype(*kNoMemory);
  } else {
    view.reset();
  }
}

}  // namespace foo::graphs
