// The arguments of one call of a tile kernel, and the call.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <deque>
#include <string>
#include <utility>

#include "launch/kernel_table.h"
#include "ops/tile.h"
#include "ops/tile_scratch.h"
#include "ops/values.h"

namespace foo {

using Tensors = c10::SmallVector<at::Tensor, 8>;

class TileCall {
 public:
  void add_tensor(const at::Tensor& tensor, bool is_written);

  void add_tensors(at::TensorList tensors, bool is_written);

  // An argument that is no tensor, and not None.
  void add_value(const std::string& name, const Kernel& kernel, const Parameter& parameter,
                 const c10::IValue& argument, const Common& common);

  void add_generator(const c10::IValue& generator);

  // A tensor that is not there.
  void add_none();

  void add_scratch();

  // False where the kernel's check does not pass, and nothing is written, or where the kernel
  // refuses late. Throws where a kernel that checks its accesses has found one outside.
  bool run(const std::string& operator_name, Kernel& kernel, const TileOptions& options,
           c10::Device device);

 private:
  using Views = c10::SmallVector<View, 8>;

  // The shapes of what there is for a call, or for each thread, from the sizes of all.
  ScratchShapes scratch_shapes(const std::string& operator_name, const TileOptions& options,
                               const int64_t* sizes, bool is_per_call) const;

  // What a view is called in the kernel.
  std::string name_of(const View* view, const Views& views, const std::deque<Scratch>& scratch,
                      const TileOptions& options) const;

  // A list of tensors: the number of the argument, and where its tensors and views are.
  struct List {
    size_t number;
    size_t begin;
    ViewList views;
  };

  // Makes the views, and gives the kernel their addresses. Returns the most elements of an
  // argument.
  int64_t make_views(Views& views, Outside& outside);

  void add_number(int64_t number);
  void add_signature(const at::Tensor& tensor);

  Tensors tensors_;
  c10::SmallVector<bool, 8> is_written_;
  c10::SmallVector<int64_t, 16> numbers_;
  // For each number the index of its tensor, or -1.
  c10::SmallVector<int64_t, 16> tensor_of_;
  c10::SmallVector<List, 1> lists_;
  // The generators, and which numbers become seeds of theirs.
  c10::SmallVector<std::pair<size_t, c10::IValue>, 1> generators_;
  Values values_;
  Signature signature_;
};

}  // namespace foo
