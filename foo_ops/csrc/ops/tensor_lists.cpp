#include "ops/tensor_lists.h"

#include <algorithm>
#include <utility>

#include "launch/kernel_table.h"
#include "launch/overlap.h"

namespace foo {

void check_list(const std::string& name, const Parameter& parameter, at::TensorList tensors) {
  TORCH_CHECK_VALUE(!tensors.empty(), name, ": ", parameter.name,
                    " must have at least one tensor, got none");
  const at::Tensor& first = tensors.front();
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK_TYPE(tensor.scalar_type() == first.scalar_type(), name, ": ", parameter.name,
                     " must have tensors of one dtype, got ", dtype_name(first.scalar_type()),
                     " and ", dtype_name(tensor.scalar_type()));
    TORCH_CHECK_VALUE(tensor.dim() == first.dim(), name, ": ", parameter.name,
                      " must have tensors with the same number of dimensions, got ", first.dim(),
                      " and ", tensor.dim());
  }
}

SharedMemory::SharedMemory(const std::string& name, const std::vector<Parameter>& parameters,
                           c10::ArrayRef<c10::IValue> arguments) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    first_.push_back(members_.size());
    const bool is_written = parameters[i].role != Parameter::Role::kRead;
    for_each_tensor(arguments[i], [&](const at::Tensor& tensor) {
      TORCH_CHECK(!is_written || !overlaps_itself(tensor), name, ": ", parameters[i].name,
                  " is written, and must not have elements that share memory");
      members_.push_back({tensor, i, is_written});
    });
  }
  std::vector<std::pair<Span, Member*>> sorted;
  for (Member& member : members_) {
    if (has_elements(member.tensor)) sorted.emplace_back(Span(member.tensor), &member);
  }
  std::sort(sorted.begin(), sorted.end(),
            [](const auto& one, const auto& other) { return one.first.begin < other.first.begin; });
  for (auto one = sorted.begin(); one != sorted.end(); ++one) {
    for (auto other = one + 1; other != sorted.end(); ++other) {
      if (other->first.begin >= one->first.end) break;
      compare(name, parameters, *one->second, *other->second);
    }
  }
}

void SharedMemory::compare(const std::string& name, const std::vector<Parameter>& parameters,
                           Member& one, Member& other) {
  if (!one.is_written && !other.is_written) return;
  if (overlap_of(one.tensor, other.tensor) == Overlap::kNone) return;
  TORCH_CHECK(one.argument != other.argument || !one.is_written, name, ": ",
              parameters[one.argument].name,
              " is written, and must not have tensors that share memory");
  const auto [first, second] = std::minmax(one.argument, other.argument);
  TORCH_CHECK(!one.is_written || !other.is_written, name, ": ", parameters[second].name,
              " is written, and must not share memory with ", parameters[first].name,
              ", which is written, too");
  (one.is_written ? one : other).is_shared = true;
}

bool SharedMemory::is_shared(size_t argument, size_t position) const {
  return members_[first_[argument] + position].is_shared;
}

}  // namespace foo
