#include "graphs/instruction.h"

#include <ATen/Parallel.h>
#include <ATen/ScalarOps.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/List.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include "graphs/shortcuts.h"
#include "launch/batch.h"

namespace foo::graphs {
namespace {

template <typename... Functions>
struct Overloaded : Functions... {
  using Functions::operator()...;
};
template <typename... Functions>
Overloaded(Functions...) -> Overloaded<Functions...>;

c10::DimVector at_position(const std::vector<Number>& numbers, int64_t position) {
  c10::DimVector values;
  for (const Number& number : numbers) values.push_back(number.at(position));
  return values;
}

bool has_strides(const at::Tensor& tensor, const std::vector<Number>& strides, int64_t position) {
  if (tensor.strides().size() != strides.size()) return false;
  for (size_t i = 0; i < strides.size(); ++i) {
    if (tensor.strides()[i] != strides[i].at(position)) return false;
  }
  return true;
}

// Returns false if the base has other strides than the recorded ones.
bool run_view(const View& view, int64_t position, Registers& registers) {
  const at::Tensor& base = registers[view.base.index];
  if (!has_strides(base, view.base_strides, position)) return false;
  set_view(registers[view.result.index], base, at_position(view.sizes, position),
           at_position(view.strides, position), base.storage_offset() + view.offset.at(position));
  return true;
}

bool is_product(const Instruction& instruction) {
  const auto* const call = std::get_if<OperatorCall>(&instruction.action);
  return call != nullptr && is_loop(*call) &&
         call->op.operator_name().name.starts_with("foo::linear");
}

// Returns how many products begin at `first` that do not read each other's results.
int64_t products_from(const std::vector<Instruction>& instructions, size_t first) {
  std::set<int64_t> written;
  size_t next = first;
  for (; next < instructions.size() && is_product(instructions[next]); ++next) {
    const auto& call = std::get<OperatorCall>(instructions[next].action);
    bool reads_result = false;
    each_read(call.arguments,
              [&](int64_t index) { reads_result = reads_result || written.count(index) > 0; });
    if (reads_result) break;
    each_written(call, [&](int64_t index) { written.insert(index); });
  }
  return std::max<int64_t>(1, next - first);
}

// Returns whether all guards hold.
bool store(const std::vector<Result>& results, int64_t position, torch::jit::Stack& stack,
           Registers& registers) {
  bool holds = true;
  for (size_t place = 0; place < results.size(); ++place) {
    c10::IValue& value = stack[place];
    std::visit(Overloaded{
                   [](std::monostate) {},
                   [&](Register target) { registers[target.index] = std::move(value).toTensor(); },
                   [&](const std::vector<int64_t>& targets) {
                     const c10::List<at::Tensor> tensors = value.toTensorList();
                     for (size_t i = 0; i < targets.size(); ++i) registers[targets[i]] = tensors[i];
                   },
                   [&](const Guard& guard) {
                     holds = holds && value == guard.expected.at(position, registers);
                   },
               },
               results[place]);
  }
  return holds;
}

bool execute(const Instruction& instruction, int64_t position, Registers& registers) {
  if (const auto* view = std::get_if<View>(&instruction.action)) {
    return run_view(*view, position, registers);
  }
  const auto& call = std::get<OperatorCall>(instruction.action);
  if (call.shortcut != nullptr && call.shortcut(call, position, registers)) return true;
  torch::jit::Stack stack;
  stack.reserve(call.arguments.size());
  for (const Argument& each : call.arguments) stack.push_back(each.at(position, registers));
  call.op.callBoxed(stack);
  return store(call.results, position, stack, registers);
}

}  // namespace

c10::IValue Argument::at(int64_t position, const Registers& registers) const {
  return std::visit(Overloaded{
                        [](const c10::IValue& constant) { return constant; },
                        [&](Register source) { return c10::IValue(registers[source.index]); },
                        [&](Number number) { return c10::IValue(number.at(position)); },
                        [&](const NumberAsTensor& it) {
                          at::Tensor tensor = c10::scalar_to_tensor(it.number.at(position));
                          tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
                          return c10::IValue(std::move(tensor));
                        },
                        [&](const std::vector<Argument>& elements) {
                          c10::impl::GenericList list(element_type);
                          list.reserve(elements.size());
                          for (const Argument& each : elements)
                            list.push_back(each.at(position, registers));
                          return c10::IValue(std::move(list));
                        },
                    },
                    value);
}

bool is_loop(const OperatorCall& call) {
  static const std::set<std::string> names = {
      "foo::linear",          "foo::linear_activation", "foo::linear_silu_mul",
      "foo::linear_int8",     "foo::linear_int4",       "foo::linear_fp8",
      "foo::linear_mxfp4",    "foo::linear_table4",     "foo::rms_norm",
      "foo::add_rms_norm",    "foo::layer_norm",        "foo::add_layer_norm",
      "foo::rotary_embedding"};
  return names.count(call.op.operator_name().name) > 0 && !call.op.schema().is_mutable();
}

std::vector<bool> sharing_memory(const std::vector<Instruction>& instructions,
                                 const std::vector<int64_t>& these, size_t count) {
  std::vector<bool> share(count);
  for (const int64_t index : these) share[index] = true;
  for (auto each = instructions.rbegin(); each != instructions.rend(); ++each) {
    if (const auto* view = std::get_if<View>(&each->action)) {
      if (share[view->result.index]) share[view->base.index] = true;
      continue;
    }
    const auto& call = std::get<OperatorCall>(each->action);
    bool has_one = false;
    each_written(call, [&](int64_t index) { has_one = has_one || share[index]; });
    // Other operators than loops may return a tensor that shares memory with an argument.
    if (!has_one || is_loop(call)) continue;
    each_read(call.arguments, [&](int64_t index) { share[index] = true; });
  }
  return share;
}

void complete(std::vector<Instruction>& instructions) {
  for (Instruction& each : instructions) {
    auto* const call = std::get_if<OperatorCall>(&each.action);
    if (call != nullptr) call->shortcut = shortcut_of(call->op.operator_name());
  }
  for (size_t i = 0; i < instructions.size(); ++i) {
    instructions[i].products = products_from(instructions, i);
  }
}

std::optional<int64_t> view_written(const Instruction& instruction) {
  if (const auto* const view = std::get_if<View>(&instruction.action)) return view->result.index;
  const auto& call = std::get<OperatorCall>(instruction.action);
  const auto* const target = makes_view(call) ? std::get_if<Register>(&call.results[0]) : nullptr;
  return target == nullptr ? std::nullopt : std::optional(target->index);
}

size_t end_of_group(const std::vector<Instruction>& instructions, size_t begin) {
  return begin + (at::get_num_threads() > 1 ? instructions[begin].products : 1);
}

bool execute(const std::vector<Instruction>& instructions, size_t begin, size_t end,
             int64_t position, Registers& registers) {
  std::optional<LoopBatch> batch;
  if (end - begin > 1) batch.emplace();
  for (size_t next = begin; next < end; ++next) {
    if (!execute(instructions[next], position, registers)) return false;
  }
  if (batch.has_value()) batch->run();
  return true;
}

bool execute_from(const std::vector<Instruction>& instructions, size_t begin, int64_t position,
                  Registers& registers) {
  for (size_t end = begin; begin < instructions.size(); begin = end) {
    end = end_of_group(instructions, begin);
    if (!execute(instructions, begin, end, position, registers)) return false;
    for (size_t next = begin; next < end; ++next) {
      for (const int64_t index : instructions[next].last_uses) registers[index].reset();
    }
  }
  return true;
}

}  // namespace foo::graphs
