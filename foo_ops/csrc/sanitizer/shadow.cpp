#include "sanitizer/shadow.h"

#include <algorithm>

namespace foo::sanitizer {
namespace {

// Programs that make a stream for each step have only few busy ones at a time.
constexpr size_t kManyStreams = 64;
constexpr size_t kMostStreams = 4096;

uint64_t key_of(c10::DeviceIndex device, c10::StreamId id) {
  return uint64_t(uint8_t(device)) << 56 | uint64_t(id);
}

}  // namespace

void Clock::advance(uint32_t stream, Tick tick) {
  if (ticks_.size() <= stream) ticks_.resize(stream + 1);
  ticks_[stream] = std::max(ticks_[stream], tick);
}

void Clock::join(const Clock& other) {
  if (ticks_.size() < other.ticks_.size()) ticks_.resize(other.ticks_.size());
  for (size_t stream = 0; stream < other.ticks_.size(); ++stream) {
    ticks_[stream] = std::max(ticks_[stream], other.ticks_[stream]);
  }
}

uint32_t Clocks::number_of(c10::Stream stream) {
  const uint64_t key = key_of(stream.device_index(), stream.id());
  const auto known = numbers_.find(key);
  if (known != numbers_.end()) return known->second;
  const uint32_t number = free_number();
  streams_[number] = {stream.device_index(), stream.id(), streams_[number].last, {}};
  numbers_[key] = number;
  return number;
}

uint32_t Clocks::free_number() {
  if (streams_.size() >= kManyStreams) {
    const auto is_idle = [&](const Stream& stream) {
      return host_[uint32_t(&stream - streams_.data())] >= stream.last;
    };
    auto idle = std::find_if(streams_.begin(), streams_.end(), is_idle);
    if (idle == streams_.end() && streams_.size() >= kMostStreams) {
      // Better to miss a finding than to use unlimited memory.
      idle = std::min_element(streams_.begin(), streams_.end(),
                              [](const Stream& a, const Stream& b) { return a.last < b.last; });
      host_.advance(uint32_t(idle - streams_.begin()), idle->last);
    }
    if (idle != streams_.end()) {
      numbers_.erase(key_of(idle->device, idle->id));
      return uint32_t(idle - streams_.begin());
    }
  }
  streams_.emplace_back();
  return uint32_t(streams_.size() - 1);
}

Moment Clocks::launch(uint32_t stream) {
  streams_[stream].last = ++tick_;
  return {stream, tick_};
}

Clock Clocks::current(uint32_t stream) const {
  Clock clock = streams_[stream].clock;
  clock.join(host_);
  clock.advance(stream, streams_[stream].last);
  return clock;
}

void Clocks::stream_waits(uint32_t stream, const void* event) {
  const auto recorded = events_.find(event);
  if (recorded != events_.end()) streams_[stream].clock.join(recorded->second);
}

void Clocks::stream_waits_for_stream(uint32_t stream, uint32_t other) {
  streams_[stream].clock.join(current(other));
}

void Clocks::host_waits_for_event(const void* event) {
  const auto recorded = events_.find(event);
  if (recorded != events_.end()) host_.join(recorded->second);
}

void Clocks::host_waits_for_stream(uint32_t stream) {
  host_.join(current(stream));
}

void Clocks::host_waits_for_device(c10::DeviceIndex index) {
  for (uint32_t stream = 0; stream < streams_.size(); ++stream) {
    if (streams_[stream].device == index) host_waits_for_stream(stream);
  }
}

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

// Merges ranges that touch or overlap.
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
  // The parts of a nested tensor have different sizes.
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
