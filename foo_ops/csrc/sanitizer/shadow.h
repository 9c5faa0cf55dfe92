// The sanitizer's state of each byte of an allocation, ordered by vector clocks.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <torch/csrc/profiler/combined_traceback.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace foo::sanitizer {

// Order of the work of streams and the host, by vector clocks.
//
// Each launch has a unique tick. A clock holds for each stream the last tick that is known to be
// done: a stream's clock tells which launches precede its next one, the host's what the host has
// waited for. Source: L. Lamport, "Time, clocks, and the ordering of events in a distributed
// system", CACM 1978; F. Mattern, "Virtual time and global states", 1989.

using Tick = uint64_t;

class Clock {
 public:
  Tick operator[](uint32_t stream) const { return stream < ticks_.size() ? ticks_[stream] : 0; }
  void advance(uint32_t stream, Tick tick);
  void join(const Clock& other);

 private:
  std::vector<Tick> ticks_;
};

// Position of a launch in the order.
struct Moment {
  uint32_t stream;
  Tick tick;
};

class Clocks {
 public:
  // Returns the number of a stream. It stays the same while work of the stream may be running.
  uint32_t number_of(c10::Stream stream);

  // Records a launch. It comes after everything that the host has waited for: all streams know what
  // the host knows.
  Moment launch(uint32_t stream);

  bool host_knows(Moment moment) const { return host_[moment.stream] >= moment.tick; }
  // Whether the stream's next launch comes after `moment`.
  bool is_before(Moment moment, uint32_t stream) const {
    return moment.stream == stream || host_knows(moment) ||
           streams_[stream].clock[moment.stream] >= moment.tick;
  }
  // Assumes an order that was missing, so that its consequences are not reported again.
  void assume_before(Moment moment, uint32_t stream) {
    streams_[stream].clock.advance(moment.stream, moment.tick);
  }

  void record(const void* event, uint32_t stream) { events_[event] = current(stream); }
  void forget(const void* event) { events_.erase(event); }
  void stream_waits(uint32_t stream, const void* event);
  void stream_waits_for_stream(uint32_t stream, uint32_t other);
  void host_waits_for_event(const void* event);
  void host_waits_for_stream(uint32_t stream);
  void host_waits_for_device(c10::DeviceIndex index);

 private:
  struct Stream {
    c10::DeviceIndex device;
    c10::StreamId id;
    Tick last = 0;
    Clock clock;
  };

  // Returns the clock of the stream's next launch, including the stream's own work up to now.
  Clock current(uint32_t stream) const;
  // Returns the number of a stream that the host knows to be idle, for reuse; else a new one.
  uint32_t free_number();

  Tick tick_ = 0;
  Clock host_;
  std::vector<Stream> streams_;
  std::unordered_map<uint64_t, uint32_t> numbers_;
  std::unordered_map<const void*, Clock> events_;
};

// A range of bytes of a storage.
struct ByteRange {
  size_t begin;
  size_t end;
};

// Returns a tensor's byte ranges, ascending and disjoint; none for an empty tensor.
std::vector<ByteRange> byte_ranges(const at::Tensor& tensor);

using Stack = std::shared_ptr<torch::CapturedTraceback>;

// A call of an operator, or a copy.
struct Launch {
  Moment moment;
  std::string operator_name;
  c10::Stream stream;
  Stack stack;
};
using LaunchPtr = std::shared_ptr<const Launch>;

// State of bytes with the same history: their last write, and the reads since.
struct Cell {
  bool is_written = false;
  LaunchPtr write;
  // The last read of each stream since the last write.
  std::vector<LaunchPtr> reads;

  bool operator==(const Cell&) const = default;
};

class Shadow {
 public:
  explicit Shadow(size_t bytes) : ranges_{{bytes, {}}} {}

  // Calls a function with the state of each piece of the ranges, which it may change.
  template <typename Function>
  void visit(const std::vector<ByteRange>& ranges, Function function);

  template <typename Function>
  void visit_all(Function function) {
    for (Range& range : ranges_) function(range.cell);
  }

  size_t size() const { return ranges_.size(); }

 private:
  // The first range begins at 0, each other one at the end of the previous one.
  struct Range {
    size_t end;
    Cell cell;
  };

  // A cache that is filled row by row, in a program that never waits, has a range per row.
  static constexpr size_t kMostRanges = 1 << 16;

  void forget_launches();
  static void append(std::vector<Range>& ranges, size_t end, Cell cell);

  std::vector<Range> ranges_;
};

inline void Shadow::append(std::vector<Range>& ranges, size_t end, Cell cell) {
  if (!ranges.empty() && ranges.back().cell == cell) {
    ranges.back().end = end;
  } else {
    ranges.push_back({end, std::move(cell)});
  }
}

template <typename Function>
void Shadow::visit(const std::vector<ByteRange>& ranges, Function function) {
  if (ranges.empty()) return;
  if (ranges_.size() == 1 && ranges[0].begin == 0 && ranges[0].end >= ranges_[0].end) {
    function(ranges_[0].cell);
    return;
  }
  std::vector<Range> result;
  result.reserve(ranges_.size() + 2);
  auto wanted = ranges.begin();
  size_t position = 0;
  for (Range& range : ranges_) {
    while (position < range.end) {
      while (wanted != ranges.end() && wanted->end <= position) ++wanted;
      const bool is_wanted = wanted != ranges.end() && wanted->begin <= position;
      size_t end = range.end;
      if (wanted != ranges.end()) end = std::min(end, is_wanted ? wanted->end : wanted->begin);
      Cell cell = end == range.end ? std::move(range.cell) : range.cell;
      if (is_wanted) function(cell);
      append(result, end, std::move(cell));
      position = end;
    }
  }
  ranges_ = std::move(result);
  if (ranges_.size() > kMostRanges) forget_launches();
}

// Better to miss a finding than to use unlimited memory.
inline void Shadow::forget_launches() {
  std::vector<Range> result;
  for (const Range& range : ranges_) append(result, range.end, {range.cell.is_written});
  ranges_ = std::move(result);
}

// Description of a tensor in a finding; it outlives the tensor.
struct Description {
  std::vector<int64_t> shape;
  std::optional<at::ScalarType> dtype;
  c10::Device device{c10::kCPU};
  // Address of the first byte, and the number of bytes to the end of the last.
  uintptr_t address = 0;
  size_t bytes = 0;
};

enum class Deed { kRead, kWrite, kAllocation, kFree };

// One side of a finding. The host has no stream.
struct Party {
  Deed deed;
  std::string operator_name;
  std::optional<c10::Stream> stream;
  Stack stack;
};

struct Finding {
  const char* kind;
  Description tensor;
  Party now;
  std::optional<Party> before;
  // For freed memory: the party that may still be using it.
  std::optional<Party> user;
};

using Findings = std::vector<Finding>;

inline constexpr const char* kRace = "race";
inline constexpr const char* kUseAfterFree = "use after free";
inline constexpr const char* kUnsynchronizedHostRead = "unsynchronized host read";
inline constexpr const char* kHostWriteDuringCopy = "host write during copy";
inline constexpr const char* kUninitializedRead = "uninitialized read";
inline constexpr const char* kHostAccess = "host access";

}  // namespace foo::sanitizer
