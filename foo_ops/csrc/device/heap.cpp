#include "device/heap.h"

#include <algorithm>
#include <bit>
#include <new>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace foo::device {

SegmentMap& segment_map() {
  static auto* map = new SegmentMap();
  return *map;
}

std::optional<c10::DeviceIndex> device_of_address(const void* address) {
  return segment_map().find(address);
}

namespace {

// Blocks tried in a request's own class, where only some are large enough, before one is taken from
// the next class, where all are.
constexpr int kTries = 8;

// Makes the address sanitizer report accesses to a free block or a header.
void forbid_access([[maybe_unused]] void* memory, [[maybe_unused]] size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  ASAN_POISON_MEMORY_REGION(memory, bytes);
#endif
}

void allow_access([[maybe_unused]] void* memory, [[maybe_unused]] size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  ASAN_UNPOISON_MEMORY_REGION(memory, bytes);
#endif
}

}  // namespace

Block* Block::next() {
  char* end = memory() + bytes;
  return end == segment->begin + segment->bytes ? nullptr : reinterpret_cast<Block*>(end);
}

Heap::SizeClass Heap::class_of(size_t bytes) {
  const size_t units = bytes / kAlignment;
  const int first = std::bit_width(units) - 1;
  if (first < kSubclassBits) return {0, static_cast<int>(units)};
  const auto second = static_cast<int>((units >> (first - kSubclassBits)) & (kSubclasses - 1));
  return {std::min(first - kSubclassBits + 1, kClasses - 1), second};
}

Block* Heap::find(size_t bytes) const {
  const auto [first, second] = class_of(bytes);
  Block* candidate = lists_[first][second];
  for (int tries = 0; candidate != nullptr && tries < kTries; ++tries) {
    if (candidate->bytes >= bytes) return candidate;
    candidate = candidate->next_free;
  }
  const uint32_t larger = subclasses_with_blocks_[first] & (~uint32_t{1} << second);
  if (larger != 0) return lists_[first][std::countr_zero(larger)];
  const uint64_t above = classes_with_blocks_ & (~uint64_t{1} << first);
  if (above == 0) return nullptr;
  const int next_first = std::countr_zero(above);
  return lists_[next_first][std::countr_zero(subclasses_with_blocks_[next_first])];
}

void Heap::count_split(Block* block, int64_t sign) {
  if (block->fills_segment()) return;
  split_figures_.blocks += sign;
  split_figures_.bytes += sign * static_cast<int64_t>(block->bytes);
}

void Heap::insert(Block* block) {
  const auto [first, second] = class_of(block->bytes);
  Block*& head = lists_[first][second];
  block->is_free = true;
  block->next_free = head;
  block->previous_free = nullptr;
  if (head != nullptr) head->previous_free = block;
  head = block;
  subclasses_with_blocks_[first] |= uint32_t{1} << second;
  classes_with_blocks_ |= uint64_t{1} << first;
  count_split(block, +1);
  forbid_access(block->memory(), block->bytes);
}

void Heap::remove(Block* block) {
  const auto [first, second] = class_of(block->bytes);
  count_split(block, -1);
  block->is_free = false;
  if (block->next_free != nullptr) block->next_free->previous_free = block->previous_free;
  if (block->previous_free != nullptr) {
    block->previous_free->next_free = block->next_free;
    return;
  }
  lists_[first][second] = block->next_free;
  if (block->next_free != nullptr) return;
  subclasses_with_blocks_[first] &= ~(uint32_t{1} << second);
  if (subclasses_with_blocks_[first] == 0) classes_with_blocks_ &= ~(uint64_t{1} << first);
}

void Heap::split(Block* block, size_t bytes) {
  if (block->bytes < bytes + sizeof(Block) + smallest_rest_) return;
  Block* after = block->next();
  void* begin = block->memory() + bytes;
  allow_access(begin, sizeof(Block));
  auto* rest = new (begin)
      Block{block->segment, block, nullptr, nullptr, block->bytes - bytes - sizeof(Block), 0, true};
  if (after != nullptr) after->previous = rest;
  block->bytes = bytes;
  insert(rest);
}

void Heap::merge_with_next(Block* block) {
  Block* next = block->next();
  block->bytes += sizeof(Block) + next->bytes;
  if (Block* after = block->next(); after != nullptr) after->previous = block;
}

Block* Heap::take(size_t bytes) {
  Block* block = find(bytes);
  if (block == nullptr) return nullptr;
  remove(block);
  split(block, bytes);
  allow_access(block->memory(), block->bytes);
  return block;
}

void Heap::give_back(Block* block) {
  if (Block* next = block->next(); next != nullptr && next->is_free) {
    remove(next);
    merge_with_next(block);
  }
  if (Block* previous = block->previous; previous != nullptr && previous->is_free) {
    remove(previous);
    merge_with_next(previous);
    block = previous;
  }
  insert(block);
}

void Heap::add(char* begin, size_t bytes, int8_t device) {
  auto* segment = new Segment{this, begin, bytes, device, segments_};
  if (segments_ != nullptr) segments_->previous = segment;
  segments_ = segment;
  insert(new (begin) Block{segment, nullptr, nullptr, nullptr, bytes - sizeof(Block), 0, true});
}

Segment* Heap::remove_unused_segment() {
  Segment* segment = segments_;
  while (segment != nullptr) {
    Block* block = segment->first_block();
    if (block->is_free && block->fills_segment()) break;
    segment = segment->next;
  }
  if (segment == nullptr) return nullptr;
  remove(segment->first_block());
  allow_access(segment->begin, segment->bytes);
  if (segment->next != nullptr) segment->next->previous = segment->previous;
  (segment->previous != nullptr ? segment->previous->next : segments_) = segment->next;
  return segment;
}

}  // namespace foo::device
