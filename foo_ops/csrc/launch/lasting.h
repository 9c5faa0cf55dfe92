// Results and calls that stay for long, such as those that a recorded program uses in each run.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "launch/scope.h"

namespace foo {

// While an instance lives, this thread's new results have memory of the C library: blocks for small
// results are few.
class LastingResults : public Scope<LastingResults> {
 public:
  static bool lives() { return current() != nullptr; }
};

// Whether a tensor is nothing but numbers in the memory of the CPU.
inline bool is_dense_on_cpu(const at::Tensor& tensor) {
  constexpr c10::DispatchKeySet kOthers({c10::DispatchKey::Python, c10::DispatchKey::Conjugate,
                                         c10::DispatchKey::Negative, c10::DispatchKey::ZeroTensor});
  return tensor.layout() == at::kStrided && tensor.is_cpu() && !tensor.key_set().has_any(kOthers);
}

// Tensors that a call is given, in the operator's order.
using TensorArguments = c10::ArrayRef<const at::Tensor*>;

// A call that is made again without its launcher, which has checked all that stays as it is.
class LastingCall {
 public:
  virtual ~LastingCall() = default;

  // Makes the call on these tensors, and writes its results where the first call has. Returns false
  // where that takes the launcher, and has written nothing then.
  virtual bool run(TensorArguments arguments) = 0;

  // How many bytes of the object are read in each call.
  virtual int64_t bytes_read() const = 0;
};

// While an instance lives, its thread's call of an operator on the CPU may leave itself to be made
// again.
class LastingCallTaker : public Scope<LastingCallTaker> {
 public:
  // `name` is the operator's with its namespace: other operators may call others.
  explicit LastingCallTaker(std::string name) : name_(std::move(name)) {}

  // Returns this thread's taker, if it takes such an operator's calls.
  static LastingCallTaker* of(std::string_view name, c10::Device device) {
    LastingCallTaker* const taker = current();
    return taker != nullptr && device.is_cpu() && taker->name_ == name ? taker : nullptr;
  }

  std::unique_ptr<LastingCall> call;

 private:
  std::string name_;
};

}  // namespace foo
