// Instructions of programs: calls of operators and views, on tensors in registers.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace foo::graphs {

// A tensor that a program is given or computes, by its index.
struct Register {
  int64_t index = 0;
};

// An integer that changes with the position, such as the length of a cache.
struct Number {
  int64_t start = 0;
  int64_t step = 0;

  int64_t at(int64_t position) const { return start + step * position; }
};

// A number in place of a tensor, as in `positions + 7`.
struct NumberAsTensor {
  Number number;
};

// Tensors of a run.
using Registers = std::vector<at::Tensor>;

// An argument of an operator, of which parts may change from run to run.
struct Argument {
  std::variant<c10::IValue, Register, Number, NumberAsTensor, std::vector<Argument>> value;
  // For lists: the type of its elements.
  c10::TypePtr element_type;

  c10::IValue at(int64_t position, const Registers& registers) const;
};

// A result that the recorded code has read as a number: another value would be another program.
struct Guard {
  Argument expected;
};

// Where an operator's result goes; results that nothing reads go nowhere.
using Result = std::variant<std::monostate, Register, std::vector<int64_t>, Guard>;

struct OperatorCall;

// Makes a call without the dispatcher. Returns false where that is impossible.
using Shortcut = bool (*)(const OperatorCall& call, int64_t position, Registers& registers);

struct OperatorCall {
  c10::OperatorHandle op;
  std::vector<Argument> arguments;
  std::vector<Result> results;
  Shortcut shortcut = nullptr;
};

// A view of a tensor that the program computes, made without the dispatcher: 0.1 us in place of
// 0.7. The base must have the strides that were recorded.
struct View {
  Register base;
  std::vector<Number> base_strides;
  Register result;
  std::vector<Number> sizes;
  std::vector<Number> strides;
  // In elements, from the beginning of `base`.
  Number offset;
};

struct Instruction {
  std::variant<OperatorCall, View> action;
  // Registers that nothing reads afterwards.
  std::vector<int64_t> last_uses;
  // How many matrix products that do not read each other's results begin here: they run in one
  // parallel loop.
  int64_t products = 1;
};

// Looks up shortcuts and products of instructions.
void complete(std::vector<Instruction>& instructions);

// Calls function(index) for each register that arguments read.
template <class Function>
void each_read(const std::vector<Argument>& arguments, const Function& function) {
  for (const Argument& each : arguments) {
    if (const auto* source = std::get_if<Register>(&each.value)) function(source->index);
    if (const auto* list = std::get_if<std::vector<Argument>>(&each.value))
      each_read(*list, function);
  }
}

template <class Function>
void each_read(const Instruction& instruction, const Function& function) {
  if (const auto* view = std::get_if<View>(&instruction.action)) {
    function(view->base.index);
  } else {
    each_read(std::get<OperatorCall>(instruction.action).arguments, function);
  }
}

// The same for each register that a call writes.
template <class Function>
void each_written(const OperatorCall& call, const Function& function) {
  for (const Result& each : call.results) {
    if (const auto* target = std::get_if<Register>(&each)) function(target->index);
    if (const auto* list = std::get_if<std::vector<int64_t>>(&each)) {
      std::for_each(list->begin(), list->end(), function);
    }
  }
}

// Returns for each of so many registers whether it may share memory with one of `these`.
std::vector<bool> sharing_memory(const std::vector<Instruction>& instructions,
                                 const std::vector<int64_t>& these, size_t count);

// Returns the register that gets a view which is made without the dispatcher, if there is one.
std::optional<int64_t> view_written(const Instruction& instruction);

// Whether all that a call does on the CPU is a parallel loop, which may wait in a batch.
bool is_loop(const OperatorCall& call);

// Runs instructions from `begin` to `end`; if there are several, they are products that do not read
// each other's results. Returns false if a guard has found another value, or a tensor has other
// strides.
bool execute(const std::vector<Instruction>& instructions, size_t begin, size_t end,
             int64_t position, Registers& registers);

// Runs all instructions from `begin` on, and lets go of what nothing reads afterwards.
bool execute_from(const std::vector<Instruction>& instructions, size_t begin, int64_t position,
                  Registers& registers);

// Returns the end of the instructions that begin at `begin` and run together.
size_t end_of_group(const std::vector<Instruction>& instructions, size_t begin);

}  // namespace foo::graphs
