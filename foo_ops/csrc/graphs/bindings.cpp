#include "graphs/bindings.h"

#include "device/device.h"
#include "device/stream.h"
#include "graphs/recorder.h"

namespace foo::graphs {
namespace {

bool is_current_stream_capturing() {
  if (!recorder().is_capturing()) return false;
  return recorder().capture_of(device::current_stream(device::current_device())) != nullptr;
}

}  // namespace

void bind_graphs(pybind11::module_& module) {
  module.def("is_current_stream_capturing", &is_current_stream_capturing);
}

}  // namespace foo::graphs
