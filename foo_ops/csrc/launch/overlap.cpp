#include "launch/overlap.h"

#include <c10/core/impl/COW.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstdint>
#include <limits>

namespace foo {

namespace {

// A term of a distance in memory: `bytes`, taken `low` to `high` times.
struct Step {
  int64_t bytes, low, high;
};

using Steps = c10::SmallVector<Step, 16>;

// Appends the steps from the first byte of a tensor to any of its bytes, or back.
void add_steps(Steps& steps, const at::Tensor& tensor, bool is_forward) {
  const auto item = static_cast<int64_t>(tensor.element_size());
  const auto add = [&](int64_t bytes, int64_t most) {
    steps.push_back(is_forward ? Step{bytes, 0, most} : Step{bytes, -most, 0});
  };
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    if (tensor.stride(i) > 0) add(tensor.stride(i) * item, tensor.size(i) - 1);
  }
  add(1, item - 1);
}

int64_t floor_divide(int64_t number, int64_t divisor) {
  return number / divisor - (number % divisor < 0);
}

// Whether steps add up to `distance`, and if `must_move` not all of them are zero. The largest step
// comes first: for slices of one tensor each step has one or two multiples to try, since the others
// together reach no further. Strides that are not nested may take long; after too many trials the
// answer is true.
bool add_up(c10::ArrayRef<Step> steps, int64_t distance, bool must_move, int& trials) {
  if (steps.empty()) return distance == 0 && !must_move;
  if (--trials < 0) return true;
  const Step& step = steps.front();
  const auto others = steps.slice(1);
  int64_t low = 0;
  int64_t high = 0;
  for (const Step& other : others) {
    low += other.bytes * other.low;
    high += other.bytes * other.high;
  }
  const int64_t first = std::max(step.low, -floor_divide(high - distance, step.bytes));
  const int64_t last = std::min(step.high, floor_divide(distance - low, step.bytes));
  for (int64_t multiple = first; multiple <= last; ++multiple) {
    const bool is_still = must_move && multiple == 0;
    if (add_up(others, distance - multiple * step.bytes, is_still, trials)) return true;
  }
  return false;
}

bool add_up(Steps steps, int64_t distance, bool must_move) {
  std::sort(steps.begin(), steps.end(),
            [](const Step& one, const Step& other) { return one.bytes > other.bytes; });
  int trials = 100'000;
  return add_up(c10::ArrayRef<Step>(steps), distance, must_move, trials);
}

// Elements of a copy-on-write tensor move to other memory before they are written.
bool is_copied_on_write(const at::Tensor& tensor) {
  return c10::impl::cow::is_cow_data_ptr(tensor.storage().data_ptr());
}

// Address of every fake storage: only tensors in one storage are compared.
constexpr int64_t kFakeStorage = 64;

bool is_fake(const at::Tensor& tensor) {
  return tensor.storage().device_type() == c10::DeviceType::Meta;
}

bool has_symbols(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
}

const char* first_byte(const at::Tensor& tensor) {
  if (!is_fake(tensor)) return static_cast<const char*>(tensor.const_data_ptr());
  const auto item = static_cast<int64_t>(tensor.element_size());
  return reinterpret_cast<const char*>(kFakeStorage + tensor.storage_offset() * item);
}

bool is_expanded(const at::Tensor& tensor) {
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    if (TORCH_GUARD_OR_FALSE(tensor.sym_stride(i).sym_eq(0)) &&
        TORCH_GUARD_OR_FALSE(tensor.sym_size(i).sym_gt(1))) {
      return true;
    }
  }
  return false;
}

}  // namespace

bool has_elements(const at::Tensor& tensor) {
  if (!has_symbols(tensor)) return tensor.numel() > 0;
  return TORCH_GUARD_OR_FALSE(tensor.sym_numel().sym_gt(0));
}

Span::Span(const at::Tensor& tensor) : begin(nullptr), end(nullptr) {
  if (has_symbols(tensor)) {
    end = reinterpret_cast<const char*>(std::numeric_limits<std::intptr_t>::max());
    return;
  }
  begin = end = first_byte(tensor);
  const at::IntArrayRef sizes = tensor.sizes(), strides = tensor.strides();
  int64_t last = 0;
  for (size_t i = 0; i < sizes.size(); ++i) last += (sizes[i] - 1) * strides[i];
  end += (last + 1) * static_cast<int64_t>(tensor.element_size());
}

Overlap overlap_of(const at::Tensor& one, const at::Tensor& other) {
  // Guards on symbols are slow, and lists have many pairs: test symbols only if all else is equal.
  if (one.is_same(other)) return has_elements(one) ? Overlap::kSame : Overlap::kNone;
  if (has_symbols(one) || has_symbols(other)) return Overlap::kNone;
  if (!has_elements(one) || !has_elements(other)) return Overlap::kNone;
  if ((is_fake(one) || is_fake(other)) && !one.is_alias_of(other)) return Overlap::kNone;
  const Span first(one);
  const Span second(other);
  if (first.end <= second.begin || second.end <= first.begin) return Overlap::kNone;
  if (!one.is_alias_of(other) && (is_copied_on_write(one) || is_copied_on_write(other))) {
    return Overlap::kNone;
  }
  if (first.begin == second.begin && one.sizes().equals(other.sizes()) &&
      one.strides().equals(other.strides()) && one.element_size() == other.element_size()) {
    return Overlap::kSame;
  }
  Steps steps;
  add_steps(steps, one, true);
  add_steps(steps, other, false);
  return add_up(std::move(steps), second.begin - first.begin, false) ? Overlap::kOther
                                                                     : Overlap::kNone;
}

bool overlaps_itself(const at::Tensor& tensor) {
  // Kernels refuse non-strided tensors with their own messages.
  if (tensor.layout() != at::kStrided || !has_elements(tensor)) return false;
  if (is_expanded(tensor)) return true;
  if (has_symbols(tensor) || tensor.is_non_overlapping_and_dense()) return false;
  Steps steps;
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    const int64_t most = tensor.size(i) - 1;
    // Distances are in whole elements.
    if (most > 0) steps.push_back({tensor.stride(i), -most, most});
  }
  return add_up(std::move(steps), 0, true);
}

void check_resizable(const std::string& operator_name, const std::string& parameter,
                     const at::Tensor& out, c10::SymIntArrayRef sizes, at::TensorList others) {
  const auto items = out.storage().sym_nbytes() / static_cast<int64_t>(out.element_size());
  c10::SymInt last = out.sym_storage_offset();
  for (int64_t i = 0; i < out.dim(); ++i) last += (out.sym_size(i) - 1) * out.sym_stride(i);
  const bool is_empty = out.sym_numel() == 0;
  // After resize_(0) a program wants the tensor's memory reused.
  const bool is_whole = out.sym_storage_offset() == 0 && (is_empty || items == last + 1);
  const bool is_alone = std::none_of(others.begin(), others.end(), [&](const at::Tensor& other) {
    return items > 0 && out.is_alias_of(other);
  });
  TORCH_CHECK_VALUE(is_whole && is_alone, operator_name, ": ", parameter, " must have shape ",
                    sizes, " as the result has, since it shares memory and cannot be resized, got ",
                    out.sym_sizes());
}

}  // namespace foo
