// Memory of a call: who may use the device's, that of large results, and snapshots of numbers.

#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>

#include <atomic>
#include <cstddef>
#include <cstring>
#include <optional>
#include <utility>

#include "launch/scope.h"

namespace foo {

// Tracks who may use memory of the device. For the sanitizer, which protects the memory from all
// others; without a listener each place costs one load.
class AccessListener {
 public:
  virtual ~AccessListener() = default;

  virtual void begin_access() = 0;
  virtual void end_access() = 0;
  // Returns whether memory is open. It is opened if an access is under way.
  virtual bool open_for_access(const void* address) = 0;
};

inline std::atomic<AccessListener*> access_listener = nullptr;

// While an instance lives, all threads may use memory of the device. Operators on foo have one
// around their kernels.
class DeviceAccess {
 public:
  DeviceAccess() : listener_(access_listener.load(std::memory_order_acquire)) {
    if (listener_ != nullptr) [[unlikely]]
      listener_->begin_access();
  }
  // Opens memory that is certain to be used, since a fault takes longer.
  explicit DeviceAccess(const void* address) : DeviceAccess() {
    if (listener_ != nullptr) [[unlikely]]
      listener_->open_for_access(address);
  }
  ~DeviceAccess() {
    if (listener_ != nullptr) [[unlikely]]
      listener_->end_access();
  }
  DeviceAccess(const DeviceAccess&) = delete;
  DeviceAccess& operator=(const DeviceAccess&) = delete;

 private:
  AccessListener* listener_;
};

// Memory of large results. The first write to new memory costs more than the work on it: the system
// clears the memory page by page, and the first touch of each page is a fault. So results have huge
// pages, and the memory of freed ones waits for later ones. The system may take the pages of
// waiting memory at any time.
//
// With huge pages, abs of float32 into a new result of 32 and 128 MB took 0.36 and 0.22 of the
// time, on a Zen 3 under a hypervisor.

// Bytes of a huge page.
inline constexpr size_t kHugePage = size_t{2} << 20;
// Fewest bytes of a large result; the C library keeps smaller blocks itself.
inline constexpr size_t kLargeResult = 2 * kHugePage;

// Returns memory for a large result, or nothing if the system has none.
c10::DataPtr allocate_result(size_t bytes);

// Memory of small results. The C library takes 0.2 us for a block that begins with a cache line, a
// fifth of the time of a small operator; here each thread keeps freed blocks for its next results.

// Most bytes of a small result.
inline constexpr size_t kSmallResult = size_t{32} << 10;

// Returns memory for a small result, or nothing if all that there is for its size is in use.
c10::DataPtr allocate_small_result(size_t bytes);

// Gives the memory of a small result back, or returns false if it is not one's.
bool free_small_result(void* memory);

struct ResultMemoryFigures {
  // Bytes of freed results that wait, and their limit: FOO_RESULT_MEMORY, or a 16th of all memory.
  size_t waiting_bytes, most_waiting_bytes;
};
ResultMemoryFigures result_memory_figures();

// Returns the memory of freed results to the system.
void release_result_memory();

// While an instance lives, this thread's new CPU tensors are results.
class NewResults : public Scope<NewResults> {
 public:
  static bool lives() { return current() != nullptr; }
};

// Returns a new, uninitialized tensor, for a result or as scratch memory.
inline at::Tensor new_tensor(c10::IntArrayRef sizes, const at::TensorOptions& options) {
  const NewResults results;
  return at::empty(sizes, options);
}

// Returns the bytes that an environment variable gives, if it is set. Raises if it is no number of
// bytes.
std::optional<size_t> bytes_of_variable(const char* name);

// Snapshots of numbers, such as indices, that are checked before they are used.

// Copies a tensor's elements to contiguous host memory of the call: another thread that writes to
// the tensor cannot change them between a check and its use.
inline at::Tensor read_once(const at::Tensor& tensor) {
  // Copies already.
  if (!tensor.is_contiguous()) return tensor.contiguous();
  const at::Tensor copy = at::detail::empty_cpu(tensor.sizes(), tensor.scalar_type());
  if (tensor.numel() > 0) {
    std::memcpy(copy.mutable_data_ptr(), tensor.const_data_ptr(), tensor.nbytes());
  }
  return copy;
}

}  // namespace foo
