// How the results of a call lie in memory, as the operator's fake kernel says.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/SmallVector.h>
#include <c10/util/hash.h>

#include <memory>
#include <unordered_map>
#include <vector>

#include "launch/fork_mutex.h"

namespace foo {

struct ResultLayout {
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  // Undefined for a result that is not there.
  at::ScalarType dtype = at::ScalarType::Undefined;
};

// The layouts of all results of a call. Calls share those that are remembered.
using SharedLayouts = std::shared_ptr<const std::vector<ResultLayout>>;

// The layouts of an operator's results, as its fake kernel says, which also refuses arguments. It
// is called once for arguments of the same shapes and values, since it is Python.
class ResultLayouts {
 public:
  explicit ResultLayouts(c10::OperatorHandle op) : op_(std::move(op)) {}

  // Takes no arguments `out`.
  SharedLayouts of(c10::ArrayRef<c10::IValue> arguments);

 private:
  // All that a fake kernel depends on: the arguments, but for the contents of tensors, and what
  // torch lets a program set for all that follows.
  using Question = c10::SmallVector<int64_t, 48>;

  struct QuestionHash {
    size_t operator()(const Question& question) const {
      size_t hash = question.size();
      for (const int64_t number : question) hash = c10::hash_combine(hash, size_t(number));
      return hash;
    }
  };

  static void ask_tensor(Question& question, const at::Tensor& tensor);
  static void ask_value(Question& question, const c10::IValue& value);
  static void ask_settings(Question& question);

  // Some megabytes at most.
  static constexpr size_t kMostAnswers = 4096;

  std::vector<ResultLayout> ask(c10::ArrayRef<c10::IValue> arguments) const;

  c10::OperatorHandle op_;
  ForkMutex mutex_;
  std::unordered_map<Question, SharedLayouts, QuestionHash> answers_;
};

}  // namespace foo
