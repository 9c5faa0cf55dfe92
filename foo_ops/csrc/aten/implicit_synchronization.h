// Which operators make the host wait for the device: those that give Python a number, and those
// whose results' sizes depend on values.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace foo::aten {

class ImplicitSynchronization {
 public:
  // Never.
  ImplicitSynchronization() = default;
  explicit ImplicitSynchronization(const c10::OperatorHandle& op);

  bool is_there(c10::ArrayRef<c10::IValue> arguments) const;

 private:
  enum class When { kNever, kAlways, kForMasks, kWithoutOutputSize };

  When when_ = When::kNever;
  // The argument that decides.
  size_t position_ = 0;
};

}  // namespace foo::aten
