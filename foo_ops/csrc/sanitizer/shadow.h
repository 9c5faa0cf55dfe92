// What the sanitizer knows of each byte of an allocation: who wrote it last, and who has read it
// since.
#pragma once

#include <torch/csrc/profiler/combined_traceback.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "sanitizer/byte_ranges.h"
#include "sanitizer/clocks.h"

namespace foo::sanitizer {

using Stack = std::shared_ptr<torch::CapturedTraceback>;

// One call of an operator, or a copy.
struct Launch {
  Moment moment;
  std::string operator_name;
  c10::Stream stream;
  Stack stack;
};
using LaunchPtr = std::shared_ptr<const Launch>;

// The state of bytes that were all treated alike.
struct Cell {
  bool is_written = false;
  LaunchPtr write;
  // The last one of each stream since the last write.
  std::vector<LaunchPtr> reads;

  bool operator==(const Cell&) const = default;
};

class Shadow {
 public:
  explicit Shadow(size_t bytes) : ranges_{{bytes, {}}} {}

  // Calls a function that may change it with the state of each piece of the ranges.
  template <typename Function>
  void visit(const std::vector<ByteRange>& ranges, Function function);

  template <typename Function>
  void visit_all(Function function) {
    for (Range& range : ranges_) function(range.cell);
  }

  size_t size() const { return ranges_.size(); }

 private:
  // The first range begins at 0, each other one where that before it ends.
  struct Range {
    size_t end;
    Cell cell;
  };

  // A cache that is filled row by row, in a program that never waits, has a range for each row.
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

// Rather a finding missed than memory without end.
inline void Shadow::forget_launches() {
  std::vector<Range> result;
  for (const Range& range : ranges_) append(result, range.end, {range.cell.is_written});
  ranges_ = std::move(result);
}

}  // namespace foo::sanitizer
