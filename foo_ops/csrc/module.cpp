// The only file that includes pybind11: it gives Python the names of foo_ops._C.

#include <torch/extension.h>

#include "device/device.h"
#include "device/generator.h"

namespace {

// The device: what torch's own Python functions for accelerators do not already give.
void bind_device(pybind11::module_& module) {
  using namespace foo::device;
  auto device = module.def_submodule("device", "Device foo.");
  device.def("device_count", [] { return int{device_count()}; });
  device.def("current_device", [] { return int{current_device()}; });
  device.def("set_device", &set_current_device);
  device.def("check_device_index", &check_device_index);
  device.def("default_generator", &default_generator);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.doc() = "The compiled companion of foo_ops.";
  bind_device(module);
}
