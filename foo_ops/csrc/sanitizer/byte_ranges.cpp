#include "sanitizer/byte_ranges.h"

#include <algorithm>

namespace foo::sanitizer {
namespace {

struct Dimension {
  size_t size;
  size_t stride;  // in bytes
};

std::vector<Dimension> dimensions_of(const at::Tensor& tensor) {
  std::vector<Dimension> dimensions;
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    const size_t stride = size_t(tensor.stride(i)) * tensor.itemsize();
    if (tensor.size(i) > 1 && stride > 0) dimensions.push_back({size_t(tensor.size(i)), stride});
  }
  std::sort(dimensions.begin(), dimensions.end(),
            [](const Dimension& a, const Dimension& b) { return a.stride < b.stride; });
  return dimensions;
}

// Ranges that touch each other or overlap become one.
void unite(std::vector<ByteRange>& ranges) {
  const auto starts_earlier = [](const ByteRange& a, const ByteRange& b) {
    return a.begin < b.begin;
  };
  if (!std::is_sorted(ranges.begin(), ranges.end(), starts_earlier)) {
    std::sort(ranges.begin(), ranges.end(), starts_earlier);
  }
  auto last = ranges.begin();
  for (const ByteRange& range : ranges) {
    if (range.begin <= last->end) {
      last->end = std::max(last->end, range.end);
    } else {
      *++last = range;
    }
  }
  ranges.erase(last + 1, ranges.end());
}

}  // namespace

std::vector<ByteRange> byte_ranges(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return {};
  // Its parts have sizes of their own.
  if (tensor.is_nested()) return {{0, tensor.storage().nbytes()}};
  const size_t begin = size_t(tensor.storage_offset()) * tensor.itemsize();
  std::vector<ByteRange> ranges = {{begin, begin + tensor.itemsize()}};
  for (const Dimension& dimension : dimensions_of(tensor)) {
    if (ranges.size() == 1 && dimension.stride <= ranges[0].end - ranges[0].begin) {
      ranges[0].end += dimension.stride * (dimension.size - 1);
      continue;
    }
    const std::vector<ByteRange> piece = ranges;
    ranges.reserve(piece.size() * dimension.size);
    for (size_t i = 1; i < dimension.size; ++i) {
      for (const ByteRange& each : piece) {
        ranges.push_back({each.begin + i * dimension.stride, each.end + i * dimension.stride});
      }
    }
    unite(ranges);
  }
  return ranges;
}

}  // namespace foo::sanitizer
