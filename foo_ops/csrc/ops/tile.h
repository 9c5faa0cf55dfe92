// One launcher for every tile kernel: a function over views of tensors and a range of tiles.

#pragma once

#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "launch/parameter.h"
#include "launch/registration.h"
#include "ops/tile_scratch.h"
#include "ops/view.h"

namespace foo {

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

}  // namespace foo
