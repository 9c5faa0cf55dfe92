#include "sanitizer/special_operators.h"

#include <utility>

#include "device/device.h"
#include "device/pinned_memory.h"
#include "device/stream.h"

namespace foo::sanitizer {
namespace {

bool is_on_foo(const at::Tensor& tensor) {
  return tensor.device().type() == device::kFoo;
}

bool is_pinned_tensor(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.has_storage() && device::is_pinned(tensor.storage().data());
}

}  // namespace

Copy::Copy(at::Tensor source, at::Tensor destination, bool non_blocking)
    : source_(std::move(source)),
      destination_(std::move(destination)),
      non_blocking_(non_blocking) {}

std::optional<Copy> Copy::of(const OperatorUses& uses, c10::ArrayRef<c10::IValue> arguments) {
  if (uses.name == "aten::_copy_from") {
    return Copy(arguments[0].toTensor(), arguments[1].toTensor(), arguments[2].toBool());
  }
  if (uses.name == "aten::_copy_from_and_resize") {
    return Copy(arguments[0].toTensor(), arguments[1].toTensor(), false);
  }
  if (uses.name == "aten::copy_") {
    return Copy(arguments[1].toTensor(), arguments[0].toTensor(), arguments[2].toBool());
  }
  return std::nullopt;
}

c10::Stream Copy::stream() const {
  const at::Tensor& tensor = is_on_foo(source_) ? source_ : destination_;
  return device::current_stream(tensor.device().index());
}

void Copy::begin(Tracker& tracker, const LaunchPtr& launch, Findings& findings) const {
  const bool leaves_device = is_on_foo(source_) && !is_on_foo(destination_);
  const bool has_values = tracker.has_values(source_);
  tracker.read(source_, launch, leaves_device ? Reads::kAll : Reads::kNothing, findings);
  tracker.write(destination_, launch, findings);
  // A copy on the device does no harm: PyTorch clones what it then fills, and pads circularly with
  // corners that are not there yet. Whoever uses the values is found.
  if (!has_values) tracker.unwritten(destination_);
}

// As on CUDA, memory that is not pinned is read or written before the call returns.
bool Copy::waits() const {
  if (is_on_foo(source_) && is_on_foo(destination_)) return false;
  return !non_blocking_ || (destination_.is_cpu() && !is_pinned_tensor(destination_));
}

void Copy::end(Tracker& tracker, const LaunchPtr& launch) const {
  if (waits()) tracker.clocks().host_waits_for_stream(launch->moment.stream);
}

Resize::Resize(c10::Storage storage)
    : storage_(std::move(storage)), memory_(storage_.data()), bytes_(storage_.nbytes()) {}

std::optional<Resize> Resize::of(const OperatorUses& uses, c10::ArrayRef<c10::IValue> arguments) {
  if (!uses.leaves_memory_unwritten || arguments.empty()) return std::nullopt;
  // That which set_ gives the tensor.
  if (arguments.size() > 1 && arguments[1].isStorage()) return Resize(arguments[1].toStorage());
  if (!arguments[0].isTensor() || !arguments[0].toTensor().has_storage()) return std::nullopt;
  return Resize(arguments[0].toTensor().storage());
}

void Resize::end(Tracker& tracker) const {
  if (storage_.data() != memory_) tracker.written(storage_.data(), bytes_);
}

}  // namespace foo::sanitizer
