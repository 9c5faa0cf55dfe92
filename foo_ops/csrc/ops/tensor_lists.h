// Lists of tensors among the arguments of a tile kernel: what they must be, and what shares memory.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <string>
#include <vector>

#include "launch/parameter.h"

namespace foo {

// Refuses a list without tensors, or with tensors of several dtypes or numbers of dimensions.
void check_list(const std::string& name, const Parameter& parameter, at::TensorList tensors);

// Which tensors of a call lie where others do. It takes the time of sorting them, where to compare
// each with all others would take longer than the kernel.
class SharedMemory {
 public:
  // Throws for elements that two tensors share which are written, or a tensor of a list itself. Of
  // fake tensors it throws where they tell.
  SharedMemory(const std::string& name, const std::vector<Parameter>& parameters,
               c10::ArrayRef<c10::IValue> arguments);

  // Whether a tensor that is written shares elements with another one, which is read.
  bool is_shared(size_t argument, size_t position) const;

 private:
  struct Member {
    at::Tensor tensor;
    size_t argument;
    bool is_written;
    bool is_shared = false;
  };

  void compare(const std::string& name, const std::vector<Parameter>& parameters, Member& one,
               Member& other);

  std::vector<Member> members_;
  // For each argument the first of its members.
  std::vector<size_t> first_;
};

}  // namespace foo
