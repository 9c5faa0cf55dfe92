// Keeps what was done to which bytes, and finds what collides. Calls nothing of Python.
#pragma once

#include <map>
#include <unordered_map>

#include "device/protection.h"
#include "sanitizer/shadow.h"

namespace foo::sanitizer {

// How much of a tensor an operator is known to read.
enum class Reads { kNothing, kSome, kAll };

class Tracker {
 public:
  LaunchPtr launch(std::string operator_name, c10::Stream stream, Stack stack);

  // Accesses of an operator, in the order of its launch. Tensors that lie neither on the device nor
  // in pinned memory are no concern.
  void read(const at::Tensor& tensor, const LaunchPtr& launch, Reads reads, Findings& findings);
  void write(const at::Tensor& tensor, const LaunchPtr& launch, Findings& findings);
  // Whether any of its bytes was written, as far as that is known.
  bool has_values(const at::Tensor& tensor);
  // Takes back that there are values.
  void unwritten(const at::Tensor& tensor);
  // The results are new, or were checked as arguments.
  void result(const at::Tensor& tensor, const LaunchPtr& launch);
  // Of the arguments: what collided with others counts as ordered from here on, so that nothing
  // that follows from one mistake is found again; and a tensor that is read and written, or passed
  // twice, has one finding.
  void end(const LaunchPtr& launch, Findings& findings);

  // Accesses of the host to pinned memory.
  void host_read(const at::Tensor& tensor, const Party& now, Findings& findings);
  void host_write(const at::Tensor& tensor, const Party& now, Findings& findings);
  // By code that is no operator: of the device any, of pinned memory what a copy uses.
  Findings touched_by_host(const void* address, const Party& now);
  // Whether launches may still be under way that use pinned memory. May err to the safe side.
  bool uses_pinned_memory() const { return !pinned_uses_.empty(); }
  std::vector<device::HostRange> pinned_memory_in_use() const;
  // To be called when the host has waited.
  void forget_done_launches();

  void allocated(const void* memory, size_t bytes, c10::Stream stream, Findings& findings);
  // The stack is of use where a stream may still be using the memory.
  bool may_be_in_use(const void* memory);
  void freed(const void* memory, Stack stack);
  // The whole allocation, or its first bytes.
  void written(const void* memory, std::optional<size_t> bytes = std::nullopt);
  void used_on(const void* memory, c10::Stream stream);
  void pinned(const void* memory, size_t bytes);
  void unpinned(const void* memory);

  Clocks& clocks() { return clocks_; }
  bool is_allocated(const void* memory) const {
    return allocations_.contains(reinterpret_cast<uintptr_t>(memory));
  }
  // For tests of what a long run keeps.
  size_t allocations() const { return allocations_.size(); }
  size_t ranges();

 private:
  struct Allocation {
    size_t bytes;
    Shadow shadow;
    bool is_pinned;
    // Not known of memory that is older than the sanitizer.
    std::optional<c10::Stream> stream;
    std::vector<uint32_t> used_on;
    Description last_tensor;
  };

  // Memory that was given back while a stream may still be using it.
  struct Freed {
    Description tensor;
    LaunchPtr user;
    bool is_written;
    Stack stack;
  };

  // Of memory that the host shares, until it knows that the launch is over.
  struct PinnedUse {
    LaunchPtr launch;
    device::HostRange range;
  };

  using Allocations = std::map<uintptr_t, Allocation>;

  Allocations::iterator find(uintptr_t address);
  // The allocation of a tensor's storage. That of memory which is older than the sanitizer is made.
  Allocations::iterator allocation_of(const at::Tensor& tensor);
  // The bytes of the tensor, counted from the begin of the allocation.
  static std::vector<ByteRange> ranges_in(Allocations::iterator allocation,
                                          const at::Tensor& tensor);
  // Memory of this age has been written, as far as anybody knows.
  static Shadow written_shadow(size_t bytes);
  // What the host knows to be over collides with nothing any more.
  void forget_done(Cell& cell);
  void note_read(Cell& cell, const LaunchPtr& launch);
  void note_pinned_use(Allocations::iterator allocation, const std::vector<ByteRange>& ranges,
                       const LaunchPtr& launch, bool is_written);
  void forget_pinned_use(const LaunchPtr& launch);
  Findings touch_pinned_memory(Allocations::iterator allocation, const Cell& touched,
                               const Party& now);
  // The tensor that was last there, else the memory itself.
  static Description description_of(Allocations::iterator allocation);
  // The last access that nothing orders before what its own stream does next.
  std::optional<Freed> last_user(Allocation& allocation);

  Clocks clocks_;
  Allocations allocations_;
  // By the number of the stream to which the memory went back.
  std::unordered_map<uint32_t, std::vector<Freed>> freed_;
  std::vector<PinnedUse> pinned_uses_;
  std::vector<Moment> collided_;
};

Description describe(const at::Tensor& tensor);

}  // namespace foo::sanitizer
