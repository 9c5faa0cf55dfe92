// What happens on the device besides operators, for the sanitizer and for the capture of graphs.
// Nobody listens otherwise, and each place costs a load for each.
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
  virtual void allocated(const void* /*memory*/, size_t /*bytes*/, c10::DeviceIndex /*index*/) {}
  virtual void allocated_by_host_kernel(const void* /*memory*/, size_t /*bytes*/,
                                        c10::DeviceIndex /*index*/) {}
  // Memory that a graph gives one of its operators each time.
  virtual void allocated_again(const void* /*memory*/) {}
  virtual void freed(const void* /*memory*/) noexcept {}
  // By what is no operator, such as copy-on-write.
  virtual void written(const void* /*memory*/, size_t /*bytes*/) {}
  virtual void used_on(const void* /*memory*/, c10::Stream /*stream*/) {}

  virtual void pinned(const void* /*memory*/, size_t /*bytes*/) {}
  virtual void unpinned(const void* /*memory*/) noexcept {}

  // Memory of the device, or pinned memory that a copy uses, by code that is no kernel. The process
  // ends after the first.
  virtual void touched_by_host(const void* /*address*/, bool /*writes*/) {}

  virtual void event_recorded(const void* /*event*/, c10::Stream /*stream*/) {}
  virtual void event_destroyed(const void* /*event*/) noexcept {}
  virtual void stream_waits(c10::Stream /*stream*/, const void* /*event*/) {}
  // A query that says "done" lets the host know as much as a synchronization. A wait that cannot be
  // raises.
  virtual void host_waits_for_event(const void* /*event*/) {}
  virtual void host_waits_for_stream(c10::Stream /*stream*/) {}
  virtual void host_waits_for_device(c10::DeviceIndex /*index*/) {}
};

// The first is told before the second, and may raise.
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
