#include "sanitizer/operator_uses.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "device/device.h"
#include "device/pinned_memory.h"
#include "device/stream.h"

namespace foo::sanitizer {
namespace {

template <size_t size>
bool is_one_of(const std::array<std::string_view, size>& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

bool contains(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

// Operators whose new tensors are uninitialized.
bool is_factory_without_values(std::string_view name) {
  return contains(name, "::empty") || contains(name, "::_empty") || contains(name, "::new_empty");
}

// Operators that read or change a tensor's metadata and touch none of its bytes.
bool touches_no_bytes(const c10::OperatorHandle& op, std::string_view name) {
  constexpr std::array<std::string_view, 9> kNames = {"aten::record_stream",
                                                      "aten::resize_as_sparse_",
                                                      "aten::_resize_output_",
                                                      "aten::is_set_to",
                                                      "aten::is_same_size",
                                                      "aten::_has_same_storage_numel",
                                                      "aten::_has_compatible_shallow_copy_type",
                                                      "aten::_fused_sdp_choice",
                                                      "aten::_nested_tensor_size"};
  return op.hasTag(at::Tag::inplace_view) || is_one_of(kNames, name) ||
         name.starts_with("aten::_nested_tensor_st");
}

// Operators that read elements depending on values, so that the others need not be initialized.
bool reads_some_elements(std::string_view name) {
  constexpr std::array<std::string_view, 7> kNames = {
      "aten::index", "aten::_unsafe_index", "aten::index_select", "aten::gather",
      "aten::take",  "aten::embedding",     "aten::masked_select"};
  return is_one_of(kNames, name) || contains(name, "embedding_bag") || contains(name, "varlen") ||
         contains(name, "cache");
}

// Operators that update all elements in place from their old values. Others, such as scatter_, may
// be meant to fill the tensor bit by bit.
bool updates_all_elements(const c10::OperatorHandle& op, std::string_view name) {
  constexpr std::array<std::string_view, 5> kFilling = {
      "aten::fill_", "aten::zero_", "aten::masked_fill_", "aten::_foreach_zero_",
      "aten::_foreach_copy_"};
  if (is_one_of(kFilling, name) || op.hasTag(at::Tag::nondeterministic_seeded)) return false;
  return op.hasTag(at::Tag::pointwise) || name.starts_with("aten::_foreach_") ||
         name.starts_with("aten::_fused_ad");
}

// Schemas of collectives do not mark written arguments: the names tell.
ArgumentUse use_in_collective(const c10::Argument& argument) {
  if (argument.name().starts_with("input")) return {Reads::kNothing, true, false};
  return {Reads::kNothing, false, true};
}

ArgumentUse use_of(const c10::OperatorHandle& op, const c10::Argument& argument) {
  const std::string& name = op.schema().name();
  if (touches_no_bytes(op, name) || is_factory_without_values(name)) return {};
  if (name.starts_with("c10d::")) return use_in_collective(argument);
  const c10::AliasInfo* alias = argument.alias_info();
  if (alias == nullptr) {
    return {reads_some_elements(name) ? Reads::kSome : Reads::kAll, true, false};
  }
  if (!alias->isWrite()) return {};
  const bool is_read = !argument.kwarg_only() && updates_all_elements(op, name);
  return {is_read ? Reads::kAll : Reads::kNothing, is_read, true};
}

}  // namespace

OperatorUses::OperatorUses(const c10::OperatorHandle& op)
    : name(op.schema().name()),
      leaves_memory_unwritten(is_factory_without_values(name) || touches_no_bytes(op, name)),
      synchronization(op) {
  for (const c10::Argument& argument : op.schema().arguments()) {
    arguments.push_back(use_of(op, argument));
  }
  if (!arguments.empty() && op.schema().arguments()[0].name() == "self") {
    beta = op.schema().argumentIndexWithName("beta");
  }
  for (const c10::Argument& result : op.schema().returns()) {
    const c10::AliasInfo* alias = result.alias_info();
    results.push_back(alias == nullptr   ? ResultUse::kNew
                      : alias->isWrite() ? ResultUse::kWritten
                                         : ResultUse::kView);
  }
}

ArgumentUse OperatorUses::use(size_t argument, c10::ArrayRef<c10::IValue> values) const {
  ArgumentUse use = arguments[argument];
  const bool is_ignored = argument == 0 && beta.has_value() && values[*beta].isScalar() &&
                          values[*beta].toScalar().equal(0);
  if (is_ignored) use.reads = Reads::kNothing;
  return use;
}

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
  // Copying uninitialized values on the device is harmless: PyTorch clones tensors before it fills
  // them, and circular padding copies corners that do not exist yet. Uses of the values are found.
  if (!has_values) tracker.unwritten(destination_);
}

// As on CUDA, unpinned memory is read or written before the call returns.
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
  // The new storage in a call of set_.
  if (arguments.size() > 1 && arguments[1].isStorage()) return Resize(arguments[1].toStorage());
  if (!arguments[0].isTensor() || !arguments[0].toTensor().has_storage()) return std::nullopt;
  return Resize(arguments[0].toTensor().storage());
}

void Resize::end(Tracker& tracker) const {
  if (storage_.data() != memory_) tracker.written(storage_.data(), bytes_);
}

}  // namespace foo::sanitizer
