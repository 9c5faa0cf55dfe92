// The order of what streams and the host do, known from vector clocks.
//
// Each launch has a tick that no other has. A clock holds for each stream the last tick that is
// known to be done: that of a stream says what its next launch comes after, that of the host what
// the host has waited for. Source: L. Lamport, "Time, clocks, and the ordering of events in a
// distributed system", CACM 1978; F. Mattern, "Virtual time and global states", 1989.
#pragma once

#include <c10/core/Stream.h>

#include <cstdint>
#include <unordered_map>
#include <vector>

namespace foo::sanitizer {

using Tick = uint64_t;

class Clock {
 public:
  Tick operator[](uint32_t stream) const { return stream < ticks_.size() ? ticks_[stream] : 0; }
  void advance(uint32_t stream, Tick tick);
  void join(const Clock& other);

 private:
  std::vector<Tick> ticks_;
};

// When a launch is done by, as far as the order is concerned.
struct Moment {
  uint32_t stream;
  Tick tick;
};

class Clocks {
 public:
  // The number of a stream. It stays the same while anything of the stream may be under way.
  uint32_t number_of(c10::Stream stream);

  // A launch comes after all that the host has waited for: what the host knows, all streams know.
  Moment launch(uint32_t stream);

  bool host_knows(Moment moment) const { return host_[moment.stream] >= moment.tick; }
  // Whether what the stream launches next comes after.
  bool is_before(Moment moment, uint32_t stream) const {
    return moment.stream == stream || host_knows(moment) ||
           streams_[stream].clock[moment.stream] >= moment.tick;
  }
  // Takes an order as given that was not there, so that what follows from it is not found again.
  void assume_before(Moment moment, uint32_t stream) {
    streams_[stream].clock.advance(moment.stream, moment.tick);
  }

  void record(const void* event, uint32_t stream) { events_[event] = current(stream); }
  void forget(const void* event) { events_.erase(event); }
  void stream_waits(uint32_t stream, const void* event);
  void stream_waits_for_stream(uint32_t stream, uint32_t other);
  void host_waits_for_event(const void* event);
  void host_waits_for_stream(uint32_t stream);
  void host_waits_for_device(c10::DeviceIndex index);

 private:
  struct Stream {
    c10::DeviceIndex device;
    c10::StreamId id;
    Tick last = 0;
    Clock clock;
  };

  // What comes before the next launch, and with it the stream itself up to now.
  Clock current(uint32_t stream) const;
  // A stream that the host knows to be idle, whose number may have another bearer; else a new one.
  uint32_t free_number();

  Tick tick_ = 0;
  Clock host_;
  std::vector<Stream> streams_;
  std::unordered_map<uint64_t, uint32_t> numbers_;
  std::unordered_map<const void*, Clock> events_;
};

}  // namespace foo::sanitizer
