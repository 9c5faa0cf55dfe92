// Observers of device events besides operators, for the sanitizer and for the capture of graphs.
// Without them each place costs two loads.
#pragma once

#include <c10/core/Stream.h>

#include <atomic>
#include <cstddef>

namespace foo::device {

class Observer {
 public:
  virtual ~Observer() = default;

  // Memory of a device. ``allocated`` may raise; the memory is then given back. Memory that CPU
  // kernels take for themselves is theirs to write.
  virtual void allocated(const void* /*memory*/, size_t /*bytes*/, c10::DeviceIndex /*index*/) {}
  virtual void allocated_by_host_kernel(const void* /*memory*/, size_t /*bytes*/,
                                        c10::DeviceIndex /*index*/) {}
  // Memory that a graph's operator gets at each replay.
  virtual void allocated_again(const void* /*memory*/) {}
  virtual void freed(const void* /*memory*/) noexcept {}
  // Written by other code than operators, such as copy-on-write.
  virtual void written(const void* /*memory*/, size_t /*bytes*/) {}
  virtual void used_on(const void* /*memory*/, c10::Stream /*stream*/) {}

  virtual void pinned(const void* /*memory*/, size_t /*bytes*/) {}
  virtual void unpinned(const void* /*memory*/) noexcept {}

  // Code other than a kernel touched device memory, or pinned memory that a copy uses. The process
  // ends after the first.
  virtual void touched_by_host(const void* /*address*/, bool /*writes*/) {}

  virtual void event_recorded(const void* /*event*/, c10::Stream /*stream*/) {}
  virtual void event_destroyed(const void* /*event*/) noexcept {}
  virtual void stream_waits(c10::Stream /*stream*/, const void* /*event*/) {}
  // A query that returns "done" tells the host as much as a synchronization. Raises for a wait that
  // is not allowed.
  virtual void host_waits_for_event(const void* /*event*/) {}
  virtual void host_waits_for_stream(c10::Stream /*stream*/) {}
  virtual void host_waits_for_device(c10::DeviceIndex /*index*/) {}
};

// The capture observer is called before the sanitizer's, and may raise.
inline std::atomic<Observer*> capture_observer = nullptr;
inline std::atomic<Observer*> sanitizer_observer = nullptr;

template <typename Function>
void observe(Function function) {
  Observer* const capture = capture_observer.load(std::memory_order_acquire);
  if (capture != nullptr) [[unlikely]]
    function(*capture);
  Observer* const sanitizer = sanitizer_observer.load(std::memory_order_acquire);
  if (sanitizer != nullptr) [[unlikely]]
    function(*sanitizer);
}

}  // namespace foo::device
