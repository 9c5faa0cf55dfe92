// Binds functions that look for changes of a weight. They hold no reference to it.

#include <ATen/Parallel.h>
#include <c10/util/irange.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <cstdint>
#include <cstring>

#include "bindings/bindings.h"

namespace foo {
namespace {

// 256 KB: a thread's share below that is read before another thread wakes up.
constexpr int64_t kIntegersPerThread = int64_t{1} << 15;

// The loop has no branch, so that a processor waits for many lines of memory at once: samples are
// spread over the weight, and few of them are in a cache.
template <class Integer>
bool holds_integers(const void* memory, const at::Tensor& sample, int64_t step, int64_t begin,
                    int64_t every) {
  const auto* now = static_cast<const Integer*>(memory);
  const auto* noted = static_cast<const Integer*>(sample.const_data_ptr());
  const int64_t count = sample.numel();
  Integer difference = 0;
  for (int64_t index = begin; index < count; index += every) {
    difference |= now[index * step] ^ noted[index];
  }
  if (count > 0) difference |= now[(count - 1) * step] ^ noted[count - 1];
  return difference == 0;
}

// Whether a weight, from an element of its memory on, has this sample of elements that are `step`
// apart. From the one at `begin` on, one of `every` so many is compared, and the last one, which
// shows appended rows.
bool holds_sample(const at::Tensor& weight, int64_t first, int64_t step, const at::Tensor& sample,
                  int64_t begin, int64_t every) {
  const auto size = static_cast<int64_t>(weight.element_size());
  const char* memory = static_cast<const char*>(weight.const_data_ptr()) + first * size;
  switch (size) {
    case 2:
      return holds_integers<uint16_t>(memory, sample, step, begin, every);
    case 4:
      return holds_integers<uint32_t>(memory, sample, step, begin, every);
    default:
      return holds_integers<uint64_t>(memory, sample, step, begin, every);
  }
}

uint64_t integer_at(const char* memory, size_t bytes) {
  uint64_t integer = 0;
  std::memcpy(&integer, memory, bytes);
  return integer;
}

// The sum of all bits of a dense weight's elements, in the order of its memory, read as integers
// of eight bytes.
int64_t sum_of_bits(const at::Tensor& weight, int64_t first, int64_t count) {
  constexpr int64_t kBytes = sizeof(uint64_t);
  const auto size = static_cast<int64_t>(weight.element_size());
  const char* memory = static_cast<const char*>(weight.const_data_ptr()) + first * size;
  const int64_t integers = count * size / kBytes, rest = count * size % kBytes;
  std::atomic<uint64_t> total = integer_at(memory + integers * kBytes, rest);
  at::parallel_for(0, integers, kIntegersPerThread, [&](int64_t begin, int64_t end) {
    uint64_t sum = 0;
    for (const auto index : c10::irange(begin, end)) {
      sum += integer_at(memory + index * kBytes, kBytes);
    }
    total += sum;
  });
  return static_cast<int64_t>(total.load());
}

}  // namespace

void bind_fingerprints(pybind11::module_& module) {
  module.def("holds_sample", &holds_sample);
  module.def("sum_of_bits", &sum_of_bits);
}

}  // namespace foo
