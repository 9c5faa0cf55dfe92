#include "device/device.h"

#include <c10/util/Exception.h>
#include <pthread.h>

#include <charconv>
#include <cstdlib>
#include <mutex>
#include <string_view>
#include <utility>

#include "launch/fork_mutex.h"
#include "launch/memory.h"
#include "launch/registration.h"

namespace foo::device {
namespace {

constexpr c10::DeviceIndex kDefaultDeviceCount = 2;

thread_local c10::DeviceIndex current_index = 0;

// Returns the number that a text begins with, and the rest; nullopt if there is no number.
std::optional<std::pair<uint64_t, std::string_view>> read_number(std::string_view text) {
  uint64_t number = 0;
  const char* const text_end = text.data() + text.size();
  const auto [end, error] = std::from_chars(text.data(), text_end, number);
  if (error != std::errc()) return std::nullopt;
  return std::pair(number, std::string_view(end, text_end - end));
}

c10::DeviceIndex read_device_count() {
  const char* text = std::getenv("FOO_DEVICE_COUNT");
  if (text == nullptr) return kDefaultDeviceCount;
  const auto [count, rest] = read_number(text).value_or(std::pair(0, ""));
  TORCH_CHECK_VALUE(rest.empty() && count >= 1 && count <= kMaxDevices,
                    "FOO_DEVICE_COUNT must be an integer from 1 to ", int{kMaxDevices}, ", got '",
                    text, "'");
  return static_cast<c10::DeviceIndex>(count);
}

}  // namespace

c10::DeviceIndex device_count() {
  static const c10::DeviceIndex count = read_device_count();
  return count;
}

std::optional<size_t> memory_limit() {
  static const std::optional<size_t> limit = bytes_of_variable("FOO_MEMORY_LIMIT");
  return limit;
}

void check_device_index(int64_t index) {
  TORCH_CHECK(index >= 0 && index < device_count(), "foo: device index must be from 0 to ",
              int{device_count()} - 1, ", got ", index);
}

c10::DeviceIndex current_device() noexcept {
  return current_index;
}

void set_current_device(int64_t index) {
  initialize();
  check_device_index(index);
  current_index = static_cast<c10::DeviceIndex>(index);
}

void set_current_device_unchecked(c10::DeviceIndex index) noexcept {
  current_index = index;
}

c10::DeviceIndex exchange_current_device(c10::DeviceIndex index) {
  initialize();
  check_device_index(index);
  return std::exchange(current_index, index);
}

c10::Device with_index(c10::Device device) {
  return device.has_index() ? device : c10::Device(device.type(), current_index);
}

namespace {

// The child lacks the device's threads, such as autograd's, and any thread that held their locks.
void after_fork_in_child() {
  if (!is_initialized()) return;
  process_state = ProcessState::kForked;
  before_first_call = &initialize_slowly;
}

// Made at load, before the mutexes that a thread may hold here. Never destroyed: threads may come
// here at exit.
ForkMutex& first_use = *new ForkMutex();

const int fork_handler_registered = [] {
  before_first_call = &initialize_slowly;
  return pthread_atfork(nullptr, nullptr, &after_fork_in_child);
}();

}  // namespace

std::atomic<ProcessState> process_state{ProcessState::kUntouched};

void (*before_first_use)() = nullptr;

void initialize_slowly() {
  TORCH_CHECK(!is_in_bad_fork(),
              "Cannot re-initialize foo in forked subprocess. To use foo with multiprocessing, you "
              "must use the 'spawn' start method");
  const std::lock_guard lock(first_use);
  if (is_initialized()) return;
  before_first_use();
  process_state = ProcessState::kInitialized;
  before_first_call = nullptr;
}

}  // namespace foo::device
