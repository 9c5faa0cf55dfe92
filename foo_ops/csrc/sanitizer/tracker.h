// Tracks the accesses to all bytes and finds conflicts. Never calls Python.
#pragma once

#include <map>
#include <unordered_map>

#include "device/protection.h"
#include "sanitizer/shadow.h"

namespace foo::sanitizer {

// The part of a tensor that an operator is known to read.
enum class Reads { kNothing, kSome, kAll };

class Tracker {
 public:
  LaunchPtr launch(std::string operator_name, c10::Stream stream, Stack stack);

  // Accesses of an operator, in the order of its launch. Ignores tensors that are neither on the
  // device nor in pinned memory.
  void read(const at::Tensor& tensor, const LaunchPtr& launch, Reads reads, Findings& findings);
  void write(const at::Tensor& tensor, const LaunchPtr& launch, Findings& findings);
  // Whether any byte of the tensor was written, as far as known.
  bool has_values(const at::Tensor& tensor);
  // Marks the tensor as uninitialized again.
  void unwritten(const at::Tensor& tensor);
  // Records results, which are new or were checked as arguments.
  void result(const at::Tensor& tensor, const LaunchPtr& launch);
  // Ends an operator. Conflicts of the arguments count as ordered from here on, so that
  // consequences of one mistake are not reported again; a tensor that is read and written, or
  // passed twice, has one finding.
  void end(const LaunchPtr& launch, Findings& findings);

  // Accesses of the host to pinned memory.
  void host_read(const at::Tensor& tensor, const Party& now, Findings& findings);
  void host_write(const at::Tensor& tensor, const Party& now, Findings& findings);
  // Accesses by code other than operators: to any device memory, or to pinned memory that a copy
  // uses.
  Findings touched_by_host(const void* address, const Party& now);
  // Whether running launches may use pinned memory. May err on the safe side.
  bool uses_pinned_memory() const { return !pinned_uses_.empty(); }
  std::vector<device::HostRange> pinned_memory_in_use() const;
  // Call this when the host has waited.
  void forget_done_launches();

  void allocated(const void* memory, size_t bytes, c10::Stream stream, Findings& findings);
  // If so, `freed` needs the stack: a stream may still be using the memory.
  bool may_be_in_use(const void* memory);
  void freed(const void* memory, Stack stack);
  // Marks the whole allocation, or its first bytes, as written.
  void written(const void* memory, std::optional<size_t> bytes = std::nullopt);
  void used_on(const void* memory, c10::Stream stream);
  void pinned(const void* memory, size_t bytes);
  void unpinned(const void* memory);

  Clocks& clocks() { return clocks_; }
  bool is_allocated(const void* memory) const {
    return allocations_.contains(reinterpret_cast<uintptr_t>(memory));
  }
  // For tests of long runs.
  size_t allocations() const { return allocations_.size(); }
  size_t ranges();

 private:
  struct Allocation {
    size_t bytes;
    Shadow shadow;
    bool is_pinned;
    // Unknown for memory older than the sanitizer.
    std::optional<c10::Stream> stream;
    std::vector<uint32_t> used_on;
    Description last_tensor;
  };

  // Memory that was freed while a stream may still be using it.
  struct Freed {
    Description tensor;
    LaunchPtr user;
    bool is_written;
    Stack stack;
  };

  // Use of memory that the host shares, until the host knows that the launch is done.
  struct PinnedUse {
    LaunchPtr launch;
    device::HostRange range;
  };

  using Allocations = std::map<uintptr_t, Allocation>;

  Allocations::iterator find(uintptr_t address);
  // Returns the allocation of a tensor's storage; makes one for memory older than the sanitizer.
  Allocations::iterator allocation_of(const at::Tensor& tensor);
  // Returns the tensor's byte ranges, relative to the begin of the allocation.
  static std::vector<ByteRange> ranges_in(Allocations::iterator allocation,
                                          const at::Tensor& tensor);
  // Returns the state of memory older than the sanitizer, which is assumed to be initialized.
  static Shadow written_shadow(size_t bytes);
  // Forgets launches that the host knows to be done: they cannot conflict any more.
  void forget_done(Cell& cell);
  void note_read(Cell& cell, const LaunchPtr& launch);
  void note_pinned_use(Allocations::iterator allocation, const std::vector<ByteRange>& ranges,
                       const LaunchPtr& launch, bool is_written);
  void forget_pinned_use(const LaunchPtr& launch);
  Findings touch_pinned_memory(Allocations::iterator allocation, const Cell& touched,
                               const Party& now);
  // Describes the last tensor in the allocation, else the memory itself.
  static Description description_of(Allocations::iterator allocation);
  // Returns the last access that is not ordered before the next work of the allocation's own
  // stream.
  std::optional<Freed> last_user(Allocation& allocation);

  Clocks clocks_;
  Allocations allocations_;
  // Keyed by the number of the stream that the memory was returned to.
  std::unordered_map<uint32_t, std::vector<Freed>> freed_;
  std::vector<PinnedUse> pinned_uses_;
  std::vector<Moment> collided_;
};

Description describe(const at::Tensor& tensor);

}  // namespace foo::sanitizer
