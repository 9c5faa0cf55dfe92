#include "device/backend_meta.h"

#include <torch/csrc/jit/serialization/pickler_helper.h>

#include <charconv>
#include <string>
#include <string_view>
#include <unordered_map>

#include "device/device.h"

namespace foo::device {
namespace {

// How a tensor of the CPU bears the format, on its way from foo to foo.
struct HostFormat final : c10::BackendMeta {
  explicit HostFormat(Format value) : format(value) {}
  Format format;
};

StorageImpl* storage_of(const at::Tensor& tensor) {
  if (tensor.device().type() != kFoo || !tensor.has_storage()) return nullptr;
  return dynamic_cast<StorageImpl*>(tensor.storage().unsafeGetStorageImpl());
}

// torch files names with a bool each, so the numbers go into the name.
constexpr std::string_view kFileKey = "foo.backend_meta ";

using FileMetadata = std::unordered_map<std::string, bool>;

void write_meta(const at::Tensor& tensor, FileMetadata& metadata) {
  if (const auto format = get_backend_meta(tensor)) {
    metadata[c10::str(kFileKey, format->first, " ", format->second)] = true;
  }
}

void read_meta(const at::Tensor& tensor, FileMetadata& metadata) {
  for (const auto& [key, value] : metadata) {
    if (!std::string_view(key).starts_with(kFileKey)) continue;
    Format format;
    const char* const end = key.data() + key.size();
    const auto version = std::from_chars(key.data() + kFileKey.size(), end, format.first);
    const auto number = std::from_chars(std::min(version.ptr + 1, end), end, format.second);
    TORCH_CHECK(version.ec == std::errc() && number.ec == std::errc() && number.ptr == end,
                "foo: backend metadata in a file must be two numbers, got '", key, "'");
    set_backend_meta(tensor, format.first, format.second);
  }
}

const bool registered = [] {
  torch::jit::TensorBackendMetaRegistry(kFoo, &write_meta, &read_meta);
  return true;
}();

}  // namespace

void set_backend_meta(const at::Tensor& tensor, int64_t version, int64_t format_number) {
  StorageImpl* storage = storage_of(tensor);
  TORCH_CHECK_VALUE(storage != nullptr, "foo: tensor must be a dense one on foo, got one on ",
                    tensor.device(), " with layout ", tensor.layout());
  storage->format = Format(version, format_number);
}

std::optional<Format> get_backend_meta(const at::Tensor& tensor) {
  if (const StorageImpl* storage = storage_of(tensor)) return storage->format;
  const auto* host =
      dynamic_cast<const HostFormat*>(tensor.unsafeGetTensorImpl()->get_backend_meta());
  return host == nullptr ? std::nullopt : std::optional(host->format);
}

void copy_backend_meta(const at::Tensor& source, const at::Tensor& destination) {
  const auto format = get_backend_meta(source);
  if (!format.has_value() || get_backend_meta(destination).has_value()) return;
  if (StorageImpl* storage = storage_of(destination)) {
    storage->format = format;
  } else {
    destination.unsafeGetTensorImpl()->set_backend_meta(c10::make_intrusive<HostFormat>(*format));
  }
}

}  // namespace foo::device
