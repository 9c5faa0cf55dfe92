// Recorded operators that run again, without Python, on other tensors and at another position.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include <cstdint>
#include <optional>
#include <utility>
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

// An argument of an operator, of which parts may change from run to run.
struct Argument {
  std::variant<c10::IValue, Register, Number, NumberAsTensor, std::vector<Argument>> value;
  // For lists: the type of its elements.
  c10::TypePtr element_type;

  c10::IValue at(int64_t position, const std::vector<at::Tensor>& registers) const;
};

// A result that the recorded code has read as a number: another value would be another program.
struct Guard {
  Argument expected;
};

// Where an operator's result goes; results that nothing reads go nowhere.
using Result = std::variant<std::monostate, Register, std::vector<int64_t>, Guard>;

// Operators that are quicker done without the dispatcher, for tensors that allow it.
enum class Shortcut { kNone, kSlice, kFill, kEmbedding };

struct OperatorCall {
  c10::OperatorHandle op;
  std::vector<Argument> arguments;
  std::vector<Result> results;
  Shortcut shortcut = Shortcut::kNone;
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

// A tensor that belongs to a program, with the memory that it had when it was recorded.
class Constant {
 public:
  explicit Constant(at::Tensor tensor);
  const at::Tensor& tensor() const { return tensor_; }
  // Whether it has the same memory and dtype still. Values may have changed.
  bool is_in_place() const;

 private:
  at::Tensor tensor_;
  const void* data_;
  c10::ScalarType dtype_;
};

class Program {
 public:
  // `inputs` and `outputs` are indices of registers; constants follow the inputs.
  Program(int64_t register_count, std::vector<int64_t> inputs, std::vector<int64_t> outputs,
          std::vector<std::pair<int64_t, at::Tensor>> constants,
          std::vector<Instruction> instructions);

  // Returns the outputs, or nothing if a guard has found another value, or a constant is no longer
  // where it was, as in a model that was moved or converted.
  std::optional<std::vector<at::Tensor>> run(int64_t position,
                                             const std::vector<at::Tensor>& inputs) const;
  size_t size() const { return instructions_.size(); }

 private:
  // Returns false if a guard has found another value, or a tensor has other strides.
  bool execute(const Instruction& instruction, int64_t position, torch::jit::Stack& stack,
               std::vector<at::Tensor>& registers) const;

  std::vector<int64_t> inputs_;
  std::vector<int64_t> outputs_;
  std::vector<std::pair<int64_t, Constant>> constants_;
  std::vector<Instruction> instructions_;
  int64_t register_count_;
};

}  // namespace foo::graphs
