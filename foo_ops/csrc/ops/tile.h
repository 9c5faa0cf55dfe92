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

#include "launch/batch.h"
#include "launch/jobs.h"
#include "launch/kernel_table.h"
#include "launch/lasting.h"
#include "launch/parameter.h"
#include "launch/registration.h"
#include "ops/values.h"
#include "ops/view.h"

namespace foo {

// Scratch memory of tile kernels: views like those of tensors, per call or per thread.

// A scratch view, in the compute type of the argument `like`.
struct ScratchOption {
  int64_t like;
  int64_t dimensions;
  bool is_per_call;
};

struct ScratchShape {
  // Position of the view among the kernel's arguments.
  size_t argument;
  c10::SmallVector<int64_t, 4> sizes;
  // Contiguous strides.
  c10::SmallVector<int64_t, 4> strides;
  int64_t elements;
  // Offset at which the next view may begin.
  int64_t bytes;
};

// Computes a scratch view's shape. Throws for sizes that no memory can hold.
ScratchShape scratch_shape(const std::string& operator_name, const std::string& name,
                           size_t argument, c10::ScalarType like, const int64_t* sizes,
                           int64_t dimensions);

using ScratchShapes = c10::SmallVector<ScratchShape, 2>;

// Holds the memory and the views of a call, or of one of its threads. If accesses are checked, the
// memory is filled with NaN, or -1.
class Scratch {
 public:
  Scratch(const ScratchShapes& shapes, int64_t place, Outside& outside);

  // Writes the addresses of the views to the kernel's arguments.
  void give(int64_t* arguments) const;
  // Returns the position of a view among the arguments, or -1.
  int64_t argument_of(const View* view) const;

 private:
  const ScratchShapes& shapes_;
  std::optional<ScratchMemory> memory_;
  c10::SmallVector<View, 2> views_;
};

// Phases of a call, in this order. The kernel runs ranges of tiles on several threads; the
// finishing phase, if the kernel has one, runs on one thread.
enum TilePhase : int64_t { kCountTiles, kRunTiles, kFinishTiles };

// Written by a kernel to `count` instead of a number of tiles.
inline constexpr int64_t kRefused = std::numeric_limits<int64_t>::min();

// `arguments` points to a number for each argument: a View's address, or a scalar's bits. In phase
// kCountTiles the kernel writes the number of tiles to `count`, or kRefused if its check fails,
// followed by the sizes of its scratch memory, which is not allocated yet. In phase kRunTiles it
// runs the tiles from `begin` to `end`, and writes kRefused to `count` if it cannot use the
// contents it reads.
using TileFunction = void(const int64_t* arguments, int64_t phase, int64_t* count, int64_t begin,
                          int64_t end);

struct TileOptions {
  // Names of the function's parameters: first arguments, then results, then scratch memory.
  std::vector<std::string> names;
  // The kernel gets every tensor with stride 1 in the last dimension.
  bool contiguous_rows;
  // The kernel gets the tensors that it writes in place a second time, as its outputs.
  bool repeats_written;
  // The kernel is called once more when all tiles are done, even if there are none.
  bool finishes;
  // The kernel may refuse contents while it runs, after it has written to some of its results.
  bool refuses_late;
  std::vector<ScratchOption> scratch;
  // For each argument, whether the kernel's check takes it.
  std::vector<bool> checks;
  // Called if the kernel or its check cannot use the tensors' contents.
  Refusal refuse;
};

// Throws if arguments that are not tensors have invalid values; fake kernels call it.
void check_tile_values(const std::string& name, const std::vector<Parameter>& parameters,
                       c10::ArrayRef<c10::IValue> arguments);

// Registers a tile kernel on a dispatch key, CPU or PrivateUse1. Results that are not written
// arguments are allocated with the sizes, strides and dtypes that the fake kernel returns.
// Everything that the fake kernel refuses is refused before anything is written.
c10::RegistrationHandleRAII register_tile(const std::string& operator_name, c10::DispatchKey key,
                                          const std::string& kernel,
                                          std::vector<Parameter> parameters, TileOptions options);

using Tensors = c10::SmallVector<at::Tensor, 8>;

class TileCall {
 public:
  void add_tensor(const at::Tensor& tensor, bool is_written);

  void add_tensors(at::TensorList tensors, bool is_written);

  // Adds an argument that is neither a tensor nor None.
  void add_value(const std::string& name, const Kernel& kernel, const Parameter& parameter,
                 const c10::IValue& argument, const Common& common);

  void add_generator(const c10::IValue& generator);

  // Adds a missing tensor.
  void add_none();

  void add_scratch();

  // Runs the call, or leaves it to this thread's batch. Returns false if the kernel's check fails
  // and nothing is written, or if the kernel refuses late. Throws if a kernel that checks its
  // accesses has found one out of bounds.
  bool run(const std::string& operator_name, Kernel& kernel, const TileOptions& options,
           c10::Device device);

  // Returns a call that has run, to be made again. Its tensors are all that it writes. For each it
  // is given whether it is a copy, which is made in each call.
  static std::unique_ptr<LastingCall> lasting(TileCall call, Kernel& kernel,
                                              const std::vector<bool>& are_copies);

 private:
  using Views = c10::SmallVector<View, 8>;

  // Arguments of calls that are made again.
  class Placed;
  // A call that waits, where its tensors and views stay.
  class Waiting;
  // A call that is made again, on other tensors.
  class Lasting;

  // Whether all that the call does is to run its tiles.
  bool can_wait(const TileOptions& options) const;

  // Returns the scratch shapes per call, or per thread, out of the sizes of all.
  ScratchShapes scratch_shapes(const std::string& operator_name, const TileOptions& options,
                               const int64_t* sizes, bool is_per_call) const;

  // Returns the name of a view in the kernel.
  std::string name_of(const View* view, const Views& views, const std::deque<Scratch>& scratch,
                      const TileOptions& options) const;

  // A list of tensors: the number of the argument, and where its tensors and views begin.
  struct List {
    size_t number;
    size_t begin;
    ViewList views;
  };

  // Makes the views and writes their addresses to the kernel's arguments. Returns the largest
  // number of elements of an argument. Kernels that check accesses record them in `outside`.
  int64_t make_views(Views& views, Outside* outside);

  void add_number(int64_t number);
  void add_signature(const at::Tensor& tensor);

  Tensors tensors_;
  c10::SmallVector<bool, 8> is_written_;
  c10::SmallVector<int64_t, 16> numbers_;
  // For each number, the index of its tensor, or -1.
  c10::SmallVector<int64_t, 16> tensor_of_;
  c10::SmallVector<List, 1> lists_;
  // Generators, and the positions of the numbers that become their seeds.
  c10::SmallVector<std::pair<size_t, c10::IValue>, 1> generators_;
  Values values_;
  Signature signature_;
};

}  // namespace foo
