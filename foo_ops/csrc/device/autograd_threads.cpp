#include "device/autograd_threads.h"

#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/autograd.h>

#include "device/device.h"
#include "device/process.h"

namespace foo::device {

// The engine tells its caller that a backward pass is over before its threads have dropped the last
// reference to the pass, and with it to the caller's Python context. A thread takes its next task
// only after that; a pass that comes from C++ has no Python context of its own.
void wait_for_autograd_threads() {
  if (!is_initialized()) return;
  const c10::InferenceMode mode(false);
  for (c10::DeviceIndex index = 0; index < device_count(); ++index) {
    const auto nothing = at::zeros({0}, at::device({kFoo, index})).set_requires_grad(true);
    torch::autograd::backward({nothing}, {at::zeros_like(nothing)});
  }
}

}  // namespace foo::device
