// Every operator is done when it returns: no stream can still be using a tensor that is freed.

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include "launch/operator_counts.h"

namespace foo::aten {
namespace {

void record_stream(at::Tensor&, c10::Stream) {}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  register_own_kernel<"aten::record_stream", &record_stream>(library);
}

}  // namespace foo::aten
