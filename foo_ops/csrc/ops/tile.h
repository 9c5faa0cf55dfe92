// One launcher for every tile kernel: a function over views of tensors and a range of tiles.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/SmallVector.h>

#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "launch/jobs.h"
#include "launch/kernel_table.h"
#include "launch/parameter.h"
#include "launch/registration.h"
#include "ops/values.h"
#include "ops/view.h"

namespace foo {

// The memory that a tile kernel works in: views like those of tensors, for a call or for a thread.

// One view of it, in the type that elements of an argument are computed in.
struct ScratchOption {
  int64_t like;
  int64_t dimensions;
  bool is_per_call;
};

struct ScratchShape {
  // The position of the view among the kernel's arguments.
  size_t argument;
  c10::SmallVector<int64_t, 4> sizes;
  // Of contiguous elements.
  c10::SmallVector<int64_t, 4> strides;
  int64_t elements;
  // Up to where the next view may begin.
  int64_t bytes;
};

// Throws for sizes that no memory has.
ScratchShape scratch_shape(const std::string& operator_name, const std::string& name,
                           size_t argument, c10::ScalarType like, const int64_t* sizes,
                           int64_t dimensions);

using ScratchShapes = c10::SmallVector<ScratchShape, 2>;

// Holds the memory and the views of one call, or of a thread of it. Where accesses are checked the
// memory is full of NaN, or of -1.
class Scratch {
 public:
  Scratch(const ScratchShapes& shapes, int64_t place, Outside& outside);

  // Writes the addresses of the views where the kernel finds its arguments.
  void give(int64_t* arguments) const;
  // Returns the argument that a view is, or -1.
  int64_t argument_of(const View* view) const;

 private:
  const ScratchShapes& shapes_;
  std::optional<ScratchMemory> memory_;
  c10::SmallVector<View, 2> views_;
};

// One launcher for every tile kernel: a function over views of tensors and a range of tiles.

// The phases of a call, in this order. The kernel runs ranges of tiles on several threads, and
// finishes on one, if it has something to do then.
enum TilePhase : int64_t { kCountTiles, kRunTiles, kFinishTiles };

// What a kernel writes to `count` in place of a number of tiles.
inline constexpr int64_t kRefused = std::numeric_limits<int64_t>::min();

// `arguments` points to a number for each argument: a View's address, or a scalar's bits. In the
// phase kCountTiles the kernel writes to `count` how many tiles there are, or kRefused where its
// check does not pass, and after it the sizes of its scratch memory, which it does not have yet. In
// the phase kRunTiles it runs the tiles from `begin` to `end`, and writes kRefused to `count` where
// it cannot use what it reads.
using TileFunction = void(const int64_t* arguments, int64_t phase, int64_t* count, int64_t begin,
                          int64_t end);

struct TileOptions {
  // The names of the function's parameters: first arguments, then results, then scratch memory.
  std::vector<std::string> names;
  // The last dimension of every tensor is given to the kernel with stride 1.
  bool contiguous_rows;
  // The kernel takes the tensors that it writes in place once more, as its outputs.
  bool repeats_written;
  // The kernel is called once more when all tiles are done, also where there are none.
  bool finishes;
  // The kernel itself finds what it cannot use, and then has written to some of its results.
  bool refuses_late;
  std::vector<ScratchOption> scratch;
  // For each argument whether the kernel's check takes it.
  std::vector<bool> checks;
  // Called where the kernel or its check cannot use what tensors contain.
  Refusal refuse;
};

// Throws what is wrong with arguments that are no tensors; fake kernels call it.
void check_tile_values(const std::string& name, const std::vector<Parameter>& parameters,
                       c10::ArrayRef<c10::IValue> arguments);

// Gives an operator a tile kernel on a dispatch key, CPU or PrivateUse1. Whatever the schema
// returns, and is no argument that it writes to, is allocated with the sizes, strides and dtypes
// that the fake kernel says. All that it refuses is refused before anything is written.
c10::RegistrationHandleRAII register_tile(const std::string& operator_name, c10::DispatchKey key,
                                          const std::string& kernel,
                                          std::vector<Parameter> parameters, TileOptions options);

// The arguments of one call of a tile kernel, and the call.

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
