// Recorded operators that run again, without Python, on other tensors and at another position.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "graphs/instruction.h"
#include "graphs/preparation.h"

namespace foo::graphs {

// A tensor that belongs to a program, with the memory that it had when it was recorded.
class Constant {
 public:
  explicit Constant(at::Tensor tensor);
  const at::Tensor& tensor() const { return tensor_; }
  // Whether it has the same memory, layout and dtype still. Values may have changed.
  bool is_in_place() const;
  // Fetches what `is_in_place` reads.
  void prefetch() const;

 private:
  at::Tensor tensor_;
  // Where its storage was; there may be another one now.
  const void* storage_;
  const void* memory_;
  int64_t offset_;
  c10::DimVector sizes_, strides_;
  c10::ScalarType dtype_;
};

class Program {
 public:
  // `inputs` and `outputs` are indices of registers; constants follow the inputs.
  Program(int64_t register_count, std::vector<int64_t> inputs, std::vector<int64_t> outputs,
          std::vector<std::pair<int64_t, at::Tensor>> constants,
          std::vector<Instruction> instructions);

  // Runs one after the other, on one thread. A tensor that is given again stays in its register in
  // between: a model's cache has several for each layer. Several threads may have a series each.
  class Series {
   public:
    explicit Series(const Program& program)
        : program_(program), lock_(program.preparation_mutex_, std::try_to_lock) {}
    ~Series();
    Series(const Series&) = delete;
    Series& operator=(const Series&) = delete;

    // Returns the outputs, or nothing if a guard has found another value, or a constant is no
    // longer where it was, as in a model that was moved or converted.
    std::optional<std::vector<at::Tensor>> run(int64_t position,
                                               const std::vector<at::Tensor>& inputs) const;

   private:
    const Program& program_;
    const std::unique_lock<std::mutex> lock_;
  };

  // A series of one run.
  std::optional<std::vector<at::Tensor>> run(int64_t position,
                                             const std::vector<at::Tensor>& inputs) const {
    return Series(*this).run(position, inputs);
  }
  size_t size() const { return instructions_.size(); }
  // How many calls need no launcher in the next run.
  size_t lasting_calls() const;

 private:
  // Runs loops that stay from run to run. Returns nothing where `execute` returns false.
  std::optional<std::vector<at::Tensor>> run_prepared(int64_t position,
                                                      const std::vector<at::Tensor>& inputs) const;
  std::vector<at::Tensor> outputs_of(const Registers& registers) const;
  Registers constants() const;

  std::vector<int64_t> inputs_;
  std::vector<int64_t> outputs_;
  std::vector<std::pair<int64_t, Constant>> constants_;
  std::vector<Instruction> instructions_;
  int64_t register_count_;
  // For one thread at a time; a second one runs the instructions as they are.
  mutable std::mutex preparation_mutex_;
  mutable std::unique_ptr<Preparation> preparation_;
};

}  // namespace foo::graphs
