#include <algorithm>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

#include "check.h"
#include "device/heap.h"

namespace foo::test {
namespace {

using device::Block;
using device::Heap;
using device::kAlignment;
using device::Segment;

constexpr size_t kSegmentBytes = size_t{1} << 20;

// Memory of a segment: the heap leaves its allocation to the caller.
struct Memory {
  explicit Memory(Heap& heap)
      : begin(static_cast<char*>(std::aligned_alloc(kAlignment, kSegmentBytes))) {
    heap.add(begin, kSegmentBytes, 0);
  }
  ~Memory() { std::free(begin); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  char* begin;
};

void remove_all(Heap& heap) {
  while (Segment* segment = heap.remove_unused_segment()) delete segment;
  TORCH_CHECK(heap.first_segment() == nullptr, "a segment is still in use");
}

struct Use {
  Block* block;
  size_t bytes;
  char pattern;
};

void fill(const Use& use) {
  std::fill_n(use.block->memory(), use.bytes, use.pattern);
}

void check_pattern(const Use& use) {
  const char* memory = use.block->memory();
  TORCH_CHECK(
      std::all_of(memory, memory + use.bytes, [&](char each) { return each == use.pattern; }),
      "another block overlaps one of ", use.bytes, " bytes");
}

FOO_TEST(blocks_do_not_overlap_whatever_the_order) {
  Heap heap(kAlignment);
  const Memory one(heap), other(heap);
  std::mt19937 random(0);
  std::vector<Use> uses;
  for (int step = 0; step < 20000; ++step) {
    const bool frees = !uses.empty() && (uses.size() > 200 || random() % 2 == 0);
    if (frees) {
      std::swap(uses[random() % uses.size()], uses.back());
      check_pattern(uses.back());
      heap.give_back(uses.back().block);
      uses.pop_back();
      continue;
    }
    const size_t bytes = kAlignment << (random() % 12);
    Block* block = heap.take(bytes);
    if (block == nullptr) continue;
    TORCH_CHECK(block->bytes >= bytes, "a block of ", block->bytes, " bytes for ", bytes);
    TORCH_CHECK(reinterpret_cast<uintptr_t>(block->memory()) % kAlignment == 0, "not aligned");
    uses.push_back({block, bytes, static_cast<char>(step)});
    fill(uses.back());
  }
  for (const Use& use : uses) {
    check_pattern(use);
    heap.give_back(use.block);
  }
  TORCH_CHECK(heap.split_figures().blocks == 0 && heap.split_figures().bytes == 0,
              "free neighbours were not merged");
  remove_all(heap);
}

FOO_TEST(a_heap_serves_nothing_larger_than_a_free_block) {
  Heap heap(kAlignment);
  TORCH_CHECK(heap.take(kAlignment) == nullptr, "a block of an empty heap");
  const Memory memory(heap);
  TORCH_CHECK(heap.take(kSegmentBytes) == nullptr, "a block larger than its segment");
  Block* whole = heap.take(kSegmentBytes - sizeof(Block));
  TORCH_CHECK(whole != nullptr && heap.take(kAlignment) == nullptr, "the segment is not full");
  heap.give_back(whole);
  remove_all(heap);
}

FOO_TEST(a_segment_in_use_is_kept) {
  Heap heap(kAlignment);
  const Memory memory(heap);
  Block* block = heap.take(kAlignment);
  TORCH_CHECK(heap.remove_unused_segment() == nullptr, "a segment in use was removed");
  TORCH_CHECK(heap.split_figures().blocks == 1, "the rest of the segment is not one block");
  heap.give_back(block);
  remove_all(heap);
}

}  // namespace
}  // namespace foo::test
