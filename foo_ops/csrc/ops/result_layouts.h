// Memory layouts of a call's results, computed by the operator's fake kernel.

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
  // Undefined for a missing result.
  at::ScalarType dtype = at::ScalarType::Undefined;
};

// Layouts of all results of a call. Calls share the remembered ones.
using SharedLayouts = std::shared_ptr<const std::vector<ResultLayout>>;

// Computes the layouts of an operator's results with its fake kernel, which also refuses arguments.
// The fake kernel is Python, so it is called once for arguments of the same shapes and values.
class ResultLayouts {
 public:
  explicit ResultLayouts(c10::OperatorHandle op) : op_(std::move(op)) {}

  // Returns the layouts; `arguments` must not include `out`.
  SharedLayouts of(c10::ArrayRef<c10::IValue> arguments);

 private:
  // Everything that a fake kernel depends on: the arguments, except tensors' contents, and the
  // global settings of torch.
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
