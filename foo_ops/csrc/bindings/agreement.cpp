// Facts that this library shares with the Python kernels.

#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <variant>
#include <vector>

#include "bindings/bindings.h"
#include "launch/kernel_table.h"
#include "ops/attention/arguments.h"
#include "ops/attention/programs.h"
#include "ops/elementwise.h"
#include "ops/experts/rows.h"
#include "ops/linear/cross_entropy.h"
#include "ops/linear/integer.h"
#include "ops/linear/product.h"
#include "ops/linear/quantized.h"
#include "ops/tile.h"

namespace py = pybind11;

namespace foo {

namespace {

struct Agreement {
  // Fields of each struct: name, type, offset.
  std::map<std::string, std::vector<std::tuple<std::string, std::string, size_t>>> structs;
  // Argument types of each function.
  std::map<std::string, std::vector<std::string>> functions;
  std::map<std::string, std::variant<int64_t, double, std::string>> constants;
  // Names of attention's options in the schemas.
  std::vector<std::string> attention_options;
};

template <class Struct>
void add_struct(Agreement& agreement) {
  auto& fields = agreement.structs[Layout<Struct>::name];
  for (const Field& field : Layout<Struct>::fields) {
    fields.emplace_back(field.name, field.type(), field.offset);
  }
}

Agreement agreement() {
  Agreement result;
  add_struct<Operand>(result);
  add_struct<Parameters>(result);
  add_struct<Piece>(result);
  add_struct<CapturedTensor>(result);
  add_struct<ProgramArguments>(result);
  add_struct<Product>(result);
  add_struct<ProductBlock>(result);
  add_struct<QuantizedProduct>(result);
  add_struct<IntegerRows>(result);
  add_struct<IntegerProduct>(result);
  add_struct<CrossEntropy>(result);
  add_struct<Gate>(result);
  add_struct<Combine>(result);
  add_struct<RowRange>(result);
  add_struct<View>(result);
  add_struct<ViewList>(result);
  add_struct<Outside>(result);
  result.functions = {{"AttentionFunction", Arguments<AttentionFunction>::names()},
                      {"ProgramFunction", Arguments<ProgramFunction>::names()},
                      {"TurnFunction", Arguments<TurnFunction>::names()},
                      {"SumFunction", Arguments<SumFunction>::names()},
                      {"ProductFunction", Arguments<ProductFunction>::names()},
                      {"QuantizedFunction", Arguments<QuantizedFunction>::names()},
                      {"IntegerRowsFunction", Arguments<IntegerRowsFunction>::names()},
                      {"IntegerFunction", Arguments<IntegerFunction>::names()},
                      {"CrossEntropyFunction", Arguments<CrossEntropyFunction>::names()},
                      {"GateFunction", Arguments<GateFunction>::names()},
                      {"CombineFunction", Arguments<CombineFunction>::names()},
                      {"ElementwiseFunction", Arguments<ElementwiseFunction>::names()},
                      {"TileFunction", Arguments<TileFunction>::names()}};
#define FOO_CONSTANT(name) {#name, name}
  result.constants = {
      FOO_CONSTANT(kQueryBlock),  FOO_CONSTANT(kTileStride),   FOO_CONSTANT(kKeyBlock),
      FOO_CONSTANT(kKeyMultiple), FOO_CONSTANT(kWidestVector), FOO_CONSTANT(kWidestPanel),
      FOO_CONSTANT(kFewQueries),  FOO_CONSTANT(kRowMultiple),  FOO_CONSTANT(kLog2E),
      FOO_CONSTANT(kNone),        FOO_CONSTANT(kBool),         FOO_CONSTANT(kOfQueryDtype),
      FOO_CONSTANT(kFloat32),     FOO_CONSTANT(kNotWanted),    FOO_CONSTANT(kStored),
      FOO_CONSTANT(kAdded),       FOO_CONSTANT(kCountTiles),   FOO_CONSTANT(kRunTiles),
      FOO_CONSTANT(kFinishTiles), FOO_CONSTANT(kRefused),      FOO_CONSTANT(kAbsentCode),
      FOO_CONSTANT(kGivenCode),   FOO_CONSTANT(kCheckedCode),  FOO_CONSTANT(kElement),
      FOO_CONSTANT(kRow),         FOO_CONSTANT(kFlat),         FOO_CONSTANT(kInRow),
      FOO_CONSTANT(kShape),       FOO_CONSTANT(kProduct),      FOO_CONSTANT(kList),
      FOO_CONSTANT(kMostIndices), FOO_CONSTANT(kHidden),       FOO_CONSTANT(kMasked),
      FOO_CONSTANT(kSeen),        FOO_CONSTANT(kMixed)};
#undef FOO_CONSTANT
  std::apply([&](const auto&... options) { result.attention_options = {options.name...}; },
             kAttentionOptions);
  return result;
}

}  // namespace

void bind_agreement(py::module_& module) {
  module.def("agreement", [] {
    const Agreement found = agreement();
    py::dict description;
    description["structs"] = found.structs;
    description["functions"] = found.functions;
    description["constants"] = found.constants;
    description["attention_options"] = found.attention_options;
    return description;
  });
}

}  // namespace foo
