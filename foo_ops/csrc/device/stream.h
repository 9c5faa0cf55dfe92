// Streams and events. Every operator is done when it returns, so each stream is always idle and
// each recorded event has already happened; what is left to them is identity, order and time.
#pragma once

#include <c10/core/Stream.h>

#include <chrono>

namespace foo::device {

struct Event {
  std::chrono::steady_clock::time_point recorded_at;
  c10::DeviceIndex device;
};

c10::Stream default_stream(c10::DeviceIndex index);
c10::Stream new_stream(c10::DeviceIndex index);
c10::Stream current_stream(c10::DeviceIndex index);
// Makes the stream the current one of its device in this thread and returns the one before.
c10::Stream exchange_current_stream(c10::Stream stream);

double elapsed_milliseconds(const Event& start, const Event& end);

}  // namespace foo::device
