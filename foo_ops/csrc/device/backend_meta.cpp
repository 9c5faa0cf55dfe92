#include "device/backend_meta.h"

#include <torch/csrc/jit/serialization/pickler_helper.h>

#include <charconv>
#include <string>
#include <string_view>
#include <unordered_map>

#include "device/device.h"

namespace foo::device {
namespace {

struct FormatMeta final : c10::BackendMeta {
  explicit FormatMeta(FormatPair pair) : format(pair) {}
  FormatPair format;
};

const FormatMeta* find_meta(const at::Tensor& tensor) {
  return dynamic_cast<const FormatMeta*>(tensor.unsafeGetTensorImpl()->get_backend_meta());
}

// torch files names with a bool each, so the numbers go into the name.
constexpr std::string_view kFileKey = "foo.backend_meta ";

using FileMetadata = std::unordered_map<std::string, bool>;

void write_meta(const at::Tensor& tensor, FileMetadata& metadata) {
  if (const FormatMeta* meta = find_meta(tensor)) {
    metadata[c10::str(kFileKey, meta->format.first, " ", meta->format.second)] = true;
  }
}

void read_meta(const at::Tensor& tensor, FileMetadata& metadata) {
  for (const auto& [key, value] : metadata) {
    if (!std::string_view(key).starts_with(kFileKey)) continue;
    FormatPair format;
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
  TORCH_CHECK_VALUE(tensor.device().type() == kFoo, "foo: tensor must be on foo, got ",
                    tensor.device());
  tensor.unsafeGetTensorImpl()->set_backend_meta(
      c10::make_intrusive<FormatMeta>(FormatPair(version, format_number)));
}

std::optional<FormatPair> get_backend_meta(const at::Tensor& tensor) {
  const FormatMeta* meta = find_meta(tensor);
  return meta == nullptr ? std::nullopt : std::optional(meta->format);
}

void copy_backend_meta(const at::Tensor& source, const at::Tensor& destination) {
  auto* source_impl = source.unsafeGetTensorImpl();
  auto* destination_impl = destination.unsafeGetTensorImpl();
  if (source_impl->get_backend_meta() == nullptr) return;
  if (destination_impl->get_backend_meta() != nullptr) return;
  destination_impl->set_backend_meta(source_impl->get_backend_meta_intrusive_ptr());
}

}  // namespace foo::device
