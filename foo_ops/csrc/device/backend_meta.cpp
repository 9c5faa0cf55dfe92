#include "device/backend_meta.h"

#include <torch/csrc/jit/serialization/pickler_helper.h>

#include <charconv>
#include <string>
#include <string_view>
#include <utility>

#include "device/device.h"

namespace foo::device {
namespace {

// Metadata where torch itself looks for it: on a CPU tensor on its way from foo to foo, and on a
// foo tensor when torch copies it from tensor to tensor.
struct TensorMetadata final : c10::BackendMeta {
  explicit TensorMetadata(Metadata value) : metadata(std::move(value)) {}
  Metadata metadata;
};

StorageImpl* storage_of(const at::Tensor& tensor) {
  if (tensor.device().type() != kFoo || !tensor.has_storage()) return nullptr;
  return dynamic_cast<StorageImpl*>(tensor.storage().unsafeGetStorageImpl());
}

Metadata metadata_of(const at::Tensor& tensor) {
  const StorageImpl* storage = storage_of(tensor);
  if (storage != nullptr && !storage->metadata.is_empty()) return storage->metadata;
  const auto* own =
      dynamic_cast<const TensorMetadata*>(tensor.unsafeGetTensorImpl()->get_backend_meta());
  return own == nullptr ? Metadata() : own->metadata;
}

void set_metadata(const at::Tensor& tensor, Metadata metadata) {
  if (StorageImpl* storage = storage_of(tensor)) storage->metadata = metadata;
  tensor.unsafeGetTensorImpl()->set_backend_meta(
      c10::make_intrusive<TensorMetadata>(std::move(metadata)));
}

// torch stores names with a bool each, so the numbers go into the name.
constexpr std::string_view kFileKey = "foo.backend_meta ";

Format read_format(std::string_view key) {
  Format format;
  const char* const end = key.data() + key.size();
  const auto version = std::from_chars(key.data() + kFileKey.size(), end, format.first);
  const auto number = std::from_chars(std::min(version.ptr + 1, end), end, format.second);
  TORCH_CHECK(version.ec == std::errc() && number.ec == std::errc() && number.ptr == end,
              "foo: backend metadata in a file must be two numbers, got '", key, "'");
  return format;
}

void write_meta(const at::Tensor& tensor, Flags& flags) {
  const Metadata metadata = metadata_of(tensor);
  flags.insert(metadata.flags.begin(), metadata.flags.end());
  if (const auto& format = metadata.format) {
    flags[c10::str(kFileKey, format->first, " ", format->second)] = true;
  }
}

void read_meta(const at::Tensor& tensor, Flags& flags) {
  // Empty if only a conjugation or a minus sign is pending: nothing about the memory.
  if (flags.empty()) return;
  Metadata metadata;
  for (const auto& [key, value] : flags) {
    if (std::string_view(key).starts_with(kFileKey)) {
      metadata.format = read_format(key);
    } else {
      metadata.flags[key] = value;
    }
  }
  set_metadata(tensor, std::move(metadata));
}

const bool metadata_registered = [] {
  torch::jit::TensorBackendMetaRegistry(kFoo, &write_meta, &read_meta);
  return true;
}();

}  // namespace

void set_backend_meta(const at::Tensor& tensor, int64_t version, int64_t format_number) {
  TORCH_CHECK_VALUE(storage_of(tensor) != nullptr,
                    "foo: tensor must be dense and on foo, got one on ", tensor.device(),
                    " with layout ", tensor.layout());
  Metadata metadata = metadata_of(tensor);
  metadata.format = Format(version, format_number);
  set_metadata(tensor, std::move(metadata));
}

std::optional<Format> get_backend_meta(const at::Tensor& tensor) {
  return metadata_of(tensor).format;
}

void copy_backend_meta(const at::Tensor& source, const at::Tensor& destination) {
  Metadata metadata = metadata_of(source);
  if (metadata.is_empty() || !metadata_of(destination).is_empty()) return;
  set_metadata(destination, std::move(metadata));
}

}  // namespace foo::device
