// The only file that includes pybind11: it gives Python the names of foo_ops._C.

#include <torch/extension.h>

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.doc() = "The compiled companion of foo_ops.";
}
