// What happens on the device besides operators, for the sanitizer. Nobody listens otherwise, and
// each place costs one load.
#pragma once

#include <c10/core/Stream.h>

#include <atomic>
#include <cstddef>

namespace foo::device {

class Observer {
 public:
  virtual ~Observer() = default;

  // Memory of a device. ``allocated`` may raise; the memory is then given back. What kernels of the
  // CPU take for themselves is theirs to write.
  virtual void allocated(const void* memory, size_t bytes, c10::DeviceIndex index) = 0;
  virtual void allocated_by_host_kernel(const void* memory, size_t bytes,
                                        c10::DeviceIndex index) = 0;
  virtual void freed(const void* memory) noexcept = 0;
  // By what is no operator, such as copy-on-write.
  virtual void written(const void* memory, size_t bytes) = 0;
  virtual void used_on(const void* memory, c10::Stream stream) = 0;

  virtual void pinned(const void* memory, size_t bytes) = 0;
  virtual void unpinned(const void* memory) noexcept = 0;

  // Memory of the device, or pinned memory that a copy uses, by code that is no kernel. The process
  // ends after the first.
  virtual void touched_by_host(const void* address, bool writes) = 0;

  virtual void event_recorded(const void* event, c10::Stream stream) = 0;
  virtual void event_destroyed(const void* event) noexcept = 0;
  virtual void stream_waits(c10::Stream stream, const void* event) = 0;
  // A query that says "done" lets the host know as much as a synchronization.
  virtual void host_waits_for_event(const void* event) = 0;
  virtual void host_waits_for_stream(c10::Stream stream) = 0;
  virtual void host_waits_for_device(c10::DeviceIndex index) = 0;
};

inline std::atomic<Observer*> observer = nullptr;

template <typename Function>
void observe(Function function) {
  Observer* const listener = observer.load(std::memory_order_acquire);
  if (listener != nullptr) [[unlikely]]
    function(*listener);
}

}  // namespace foo::device
