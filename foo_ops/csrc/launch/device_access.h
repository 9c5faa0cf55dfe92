// Tracks who may use memory of the device. For the sanitizer, which protects the memory from all
// others; without a listener each place costs one load.
#pragma once

#include <atomic>

namespace foo {

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

}  // namespace foo
