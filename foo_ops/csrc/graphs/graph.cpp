// torch.accelerator.Graph on foo, and torch.foo.FooGraph.

#include <ATen/core/GraphImplInterface.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <fstream>
#include <memory>
#include <optional>
#include <utility>

#include "device/device.h"
#include "device/device_memory.h"
#include "device/stream.h"
#include "graphs/recorder.h"
#include "launch/memory.h"

namespace foo::graphs {
namespace {

class Graph final : public at::GraphImplInterface {
 public:
  explicit Graph(const at::GraphImplArgs& args) : keep_graph_(args.keep_graph) {}
  ~Graph() override {
    if (capture_ != nullptr) abandon();
    reset();
  }

  // Operators run in the program's order in every mode, and every mode refuses what no graph can
  // hold.
  void capture_begin(at::MempoolId_t pool, at::GraphCaptureMode) override {
    TORCH_CHECK(
        capture_ == nullptr && !recording_,
        "capture_begin: this graph has been captured already: call reset(), or use another graph");
    const c10::DeviceIndex index = device::current_device();
    const c10::Stream stream = device::current_stream(index);
    TORCH_CHECK(stream != device::default_stream(index),
                "capture_begin: the current stream must not be the default one: capture on another "
                "stream, and replay on any");
    pool_ = pool == device::kCommonPool ? device::new_pool_id(/*is_for_capture=*/true) : pool;
    device_ = index;
    device::memory_of(index).add_user(pool_, {});
    try {
      capture_ = recorder().begin(stream, pool_);
    } catch (...) {
      device::memory_of(index).remove_user(pool_);
      throw;
    }
  }

  void capture_end() override {
    TORCH_CHECK(capture_ != nullptr, "capture_end: no capture is under way");
    const c10::Stream stream = device::current_stream(capture_->stream().device_index());
    TORCH_CHECK(stream == capture_->stream(),
                "capture_end: the current stream must be that of capture_begin");
    const auto capture = std::exchange(capture_, nullptr);
    try {
      recording_ = recorder().end(capture);
    } catch (...) {
      device::memory_of(device_).remove_user(pool_);
      throw;
    }
    is_instantiated_ = !keep_graph_;
  }

  void instantiate() override {
    check_captured("instantiate");
    is_instantiated_ = true;
  }

  void replay() override {
    check_captured("replay");
    TORCH_CHECK(!recorder().is_capturing(), "replay: a graph is being captured");
    is_instantiated_ = true;
    check_inputs();
    const c10::impl::ExcludeDispatchKeyGuard below_autograd(
        c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset);
    for (const auto& step : recording_->steps) step->replay();
  }

  void reset() override {
    TORCH_CHECK(capture_ == nullptr, "reset: a capture is under way");
    if (!recording_) return;
    recording_.reset();
    device::memory_of(device_).remove_user(pool_);
  }

  at::MempoolId_t pool() const override {
    TORCH_CHECK(capture_ != nullptr || recording_, "pool: nothing has been captured");
    return pool_;
  }

  void enable_debug_mode() override { is_debugged_ = true; }

  // Writes the operators in their order, in Graphviz's language.
  void debug_dump(const std::string& path) override {
    check_captured("debug_dump");
    TORCH_CHECK(is_debugged_, "debug_dump: call enable_debug_mode() first");
    std::ofstream file(path);
    TORCH_CHECK(file.is_open(), "debug_dump: cannot write to ", path);
    file << "digraph {\n";
    for (size_t i = 0; i < recording_->steps.size(); ++i) {
      file << "  " << i << " [label=\"" << recording_->steps[i]->describe() << "\"];\n";
      if (i > 0) file << "  " << i - 1 << " -> " << i << ";\n";
    }
    file << "}\n";
  }

 private:
  void check_captured(const char* name) const {
    TORCH_CHECK(recording_.has_value(), name, ": nothing has been captured");
  }

  // A GPU would use whatever the memory holds now.
  void check_inputs() const {
    for (const Input& input : recording_->inputs) {
      const auto storage = input.storage.lock();
      TORCH_CHECK(storage != nullptr && storage->data() == input.data, "replay: memory that ",
                  input.user,
                  " uses has been freed or moved since the capture: keep the tensors that a graph "
                  "reads and writes, and change them in place");
    }
  }

  void abandon() noexcept {
    try {
      recorder().end(std::exchange(capture_, nullptr));
    } catch (const c10::Error&) {
      // The capture had failed, and nobody needs it.
    }
    device::memory_of(device_).remove_user(pool_);
  }

  const bool keep_graph_;
  bool is_instantiated_ = false;
  bool is_debugged_ = false;
  c10::DeviceIndex device_ = 0;
  device::PoolId pool_ = device::kCommonPool;
  std::shared_ptr<Capture> capture_;
  std::optional<Recording> recording_;
};

using at::GraphImplRegistry;
using at::RegistererGraphImplRegistry;

// torch looks the class up by the device's name.
C10_REGISTER_CLASS(GraphImplRegistry, FOO, Graph)

}  // namespace
}  // namespace foo::graphs
