// Runs graphs that Inductor has compiled to C++ for tensors of foo.

#include <ATen/DynamicLibrary.h>
#include <torch/csrc/inductor/aoti_runner/model_container_runner_cpu.h>
#include <torch/csrc/inductor/aoti_torch/tensor_converter.h>

#include <algorithm>
#include <memory>
#include <string>

#include "aten/aten.h"
#include "aten/host_call.h"
#include "aten/observers.h"
#include "device/device.h"

namespace foo::aten {
namespace {

using torch::inductor::AOTIModelContainerRunner;
using torch::inductor::AOTIModelContainerRunnerCpu;

// Returns the device that a package was loaded for, else that of the first tensor of foo.
c10::Device device_of_run(c10::Device loaded, const Tensors& inputs) {
  if (loaded.has_index()) return loaded;
  const auto first = std::find_if(inputs.begin(), inputs.end(), [](const at::Tensor& input) {
    return input.device().type() == device::kFoo;
  });
  return first == inputs.end() ? device::with_index(loaded) : first->device();
}

// A model in an AOTInductor package.
class Runner final : public AOTIModelContainerRunnerCpu {
 public:
  Runner(const std::string& path, size_t num_models, const std::string& device, bool is_one_thread)
      : AOTIModelContainerRunnerCpu(path, num_models, is_one_thread),
        device_(device),
        results_(static_cast<const char*>(model_so_->sym("foo_devices_of_results"))) {}

 private:
  // Takes ownership of the handles.
  Tensors run_impl(std::vector<AtenTensorHandle>& handles, void* stream) override {
    const Tensors inputs =
        torch::aot_inductor::alloc_tensors_by_stealing_from_handles(handles.data(), handles.size());
    return run_compiled_graph(
        device_of_run(device_, inputs), inputs, results_, [&](const Tensors& host) {
          auto host_handles = torch::aot_inductor::unsafe_alloc_new_handles_from_tensors(host);
          return AOTIModelContainerRunnerCpu::run_impl(host_handles, stream);
        });
  }

  const c10::Device device_;
  // FooCppWrapper writes these letters into the model's library.
  const std::string_view results_;
};

std::unique_ptr<AOTIModelContainerRunner> make_runner(const std::string& path, size_t num_models,
                                                      const std::string& device,
                                                      const std::string& /*bin_dir*/,
                                                      bool is_one_thread) {
  return std::make_unique<Runner>(path, num_models, device, is_one_thread);
}

const torch::inductor::RegisterAOTIModelRunner registration("foo", &make_runner);

}  // namespace

namespace {

Tensors run_unobserved(c10::Device device, const Tensors& inputs, std::string_view devices,
                       c10::function_ref<Tensors(Tensors)> run) {
  HostCall call(device);
  Tensors host;
  for (const at::Tensor& input : inputs) {
    TORCH_CHECK(input.is_cpu() || input.device() == device,
                "Expected all tensors to be on the same device, but found at least two devices, ",
                device, " and ", input.device(), "!");
    host.push_back(call.to_host(input));
  }
  Tensors results = run(std::move(host));
  call.write_back();
  for (size_t position = 0; position < results.size(); ++position) {
    at::Tensor& result = results[position];
    if (devices[position] == 'f') result = call.to_foo(result);
  }
  return results;
}

}  // namespace

Tensors run_compiled_graph(c10::Device device, const Tensors& inputs, std::string_view devices,
                           c10::function_ref<Tensors(Tensors)> run) {
  return observe_graph(inputs, [&] { return run_unobserved(device, inputs, devices, run); });
}

}  // namespace foo::aten
