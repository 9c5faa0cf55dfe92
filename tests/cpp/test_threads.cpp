// Eight threads use shared state: ThreadSanitizer must see no race, and the final figures must be
// exact.
#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "aten/host_call.h"
#include "check.h"
#include "device/allocator.h"
#include "device/device.h"
#include "device/generator.h"
#include "device/pinned_memory.h"
#include "launch/kernel_table.h"
#include "launch/registration.h"
#include "threads.h"

namespace foo::test {
namespace {

constexpr int kThreads = 8;
constexpr int kSteps = 200;

c10::Device device_of(int thread) {
  return {device::kFoo, static_cast<c10::DeviceIndex>(thread % 2)};
}

void check_that_nothing_is_allocated() {
  for (const c10::DeviceIndex index : {0, 1}) {
    const auto statistics = device::allocator().getDeviceStats(index);
    TORCH_CHECK(statistics.allocated_bytes[0].current == 0, statistics.allocated_bytes[0].current,
                " bytes are left on foo:", int{index});
    TORCH_CHECK(statistics.allocation[0].current == 0);
  }
}

FOO_TEST(threads_fill_copy_and_free_tensors) {
  in_threads(kThreads, [](int thread) {
    const c10::DeviceGuard guard(device_of(thread));
    for (int step = 0; step < kSteps; ++step) {
      at::Tensor tensor = at::full({1 + step * 7 % 500}, thread, c10::Device(device::kFoo));
      const at::Tensor elsewhere = tensor.to(device_of(thread + 1));
      tensor.resize_({1000});
      TORCH_CHECK(elsewhere.cpu().eq(thread).all().item<bool>(), "the numbers of another thread");
      if (step % 50 == 0) device::allocator().emptyCache();
    }
  });
  check_that_nothing_is_allocated();
}

FOO_TEST(threads_share_memory_that_its_first_owner_leaves) {
  in_threads(kThreads, [](int thread) {
    const c10::DeviceGuard guard(device_of(thread));
    for (int step = 0; step < kSteps; ++step) {
      at::Tensor host;
      {
        const at::Tensor tensor = at::full({100}, step, c10::Device(device::kFoo));
        host = aten::HostCall(tensor.device()).to_host(tensor);
        tensor.storage().unsafeGetStorageImpl()->set_data_ptr_noswap({nullptr, tensor.device()});
      }
      device::allocator().emptyCache();
      TORCH_CHECK(host.eq(step).all().item<bool>(), "the memory is another's");
    }
  });
  check_that_nothing_is_allocated();
}

FOO_TEST(threads_alias_and_leave_one_tensor) {
  std::optional<at::Tensor> kept = at::ones({100}, device_of(0));
  const at::Tensor& tensor = *kept;
  const auto allocated = [] {
    return device::allocator().getDeviceStats(0).allocated_bytes[0].current;
  };
  const int64_t bytes = allocated();
  in_threads(kThreads, [&](int) {
    for (int step = 0; step < 50 * kSteps; ++step) {
      const at::Tensor host = aten::HostCall(tensor.device()).to_host(tensor);
      TORCH_CHECK(host.data_ptr() == tensor.data_ptr());
    }
  });
  TORCH_CHECK(tensor.eq(1).all().item<bool>());
  TORCH_CHECK(tensor.storage().use_count() == 1, tensor.storage().use_count(), " aliases are left");
  TORCH_CHECK(allocated() == bytes, "the memory was freed too early");
  kept.reset();
  check_that_nothing_is_allocated();
}

FOO_TEST(threads_draw_each_number_once) {
  const at::Generator shared = device::new_generator(0);
  const auto draw = [&] { return at::rand({16}, shared, device_of(0)).cpu(); };
  at::Generator(shared).set_current_seed(7);
  std::vector<at::Tensor> expected;
  for (int step = 0; step < kThreads * kSteps; ++step) expected.push_back(draw());
  at::Generator(shared).set_current_seed(7);
  std::vector<std::vector<at::Tensor>> drawn(kThreads);
  in_threads(kThreads, [&](int thread) {
    for (int step = 0; step < kSteps; ++step) drawn[thread].push_back(draw());
  });
  std::vector<at::Tensor> all;
  for (const auto& each : drawn) all.insert(all.end(), each.begin(), each.end());
  const auto sorted = [](const std::vector<at::Tensor>& list) {
    return std::get<0>(at::stack(list).flatten().sort());
  };
  TORCH_CHECK(sorted(all).equal(sorted(expected)), "numbers were drawn twice or left out");
}

FOO_TEST(threads_count_operators) {
  reset_operator_counts();
  const auto name_of = [](int step) { return "test::operator" + std::to_string(step); };
  in_threads(kThreads, [&](int thread) {
    for (int step = 0; step < kSteps; ++step) ++operator_count(name_of(step)).own;
    const at::Tensor tensor = at::ones({4}, device_of(thread));
    for (int step = 0; step < kSteps; ++step) (tensor + 1).view({2, 2});
  });
  const auto counts = operator_counts();
  for (int step = 0; step < kSteps; ++step) {
    TORCH_CHECK((counts.at(name_of(step)) == std::pair<int64_t, int64_t>(kThreads, 0)));
  }
  constexpr int64_t kCalls = kThreads * kSteps;
  TORCH_CHECK((counts.at("aten::add.Tensor") == std::pair<int64_t, int64_t>(0, kCalls)));
  TORCH_CHECK((counts.at("aten::view") == std::pair<int64_t, int64_t>(kCalls, 0)));
}

struct RunsAtTheEnd {
  ~RunsAtTheEnd() { sum = (at::ones({4}, device_of(0)) + 1).sum().item<double>(); }
  static std::atomic<double> sum;
};
std::atomic<double> RunsAtTheEnd::sum = 0;

FOO_TEST(a_thread_runs_operators_while_it_ends) {
  in_threads(1, [](int) {
    thread_local RunsAtTheEnd made_before_the_counters;
    static_cast<void>(&made_before_the_counters);
    at::ones({4}, device_of(0)) + 1;
  });
  TORCH_CHECK(RunsAtTheEnd::sum == 8);
}

std::atomic<int> resolved = 0;

void* resolve(const std::string& kernel, const std::string& signature) {
  ++resolved;
  return new std::string(kernel + " for " + signature);
}

FOO_TEST(threads_find_kernels) {
  set_resolver(&resolve);
  static Kernel kernel("test");
  in_threads(kThreads, [](int) {
    for (int step = 0; step < kSteps; ++step) {
      const auto dtype = step % 2 == 0 ? at::kFloat : at::kDouble;
      const auto* found = reinterpret_cast<const std::string*>(kernel.get<void()>(dtype));
      TORCH_CHECK(*found == "test for " + dtype_name(dtype), "found ", *found);
    }
  });
  TORCH_CHECK(resolved >= 2 && resolved <= 2 * kThreads, "resolved ", resolved.load(), " times");
  const int before = resolved;
  kernel.get<void()>(at::kFloat);
  TORCH_CHECK(resolved == before, "a kernel that was there is resolved again");
}

FOO_TEST(threads_have_streams_of_their_own) {
  const c10::impl::VirtualGuardImpl guard(device::kFoo);
  std::vector<std::vector<c10::StreamId>> ids(kThreads);
  in_threads(kThreads, [&](int thread) {
    const c10::Device device = device_of(thread);
    c10::Event event(device::kFoo, c10::EventFlag::BACKEND_DEFAULT);
    for (int step = 0; step < kSteps; ++step) {
      const c10::Stream stream = guard.getNewStream(device);
      ids[thread].push_back(stream.id());
      guard.exchangeStream(stream);
      TORCH_CHECK(guard.getStream(device) == stream, "the stream of another thread");
      event.record(stream);
      event.synchronize();
    }
  });
  std::vector<c10::StreamId> all;
  for (const auto& each : ids) all.insert(all.end(), each.begin(), each.end());
  std::sort(all.begin(), all.end());
  TORCH_CHECK(std::adjacent_find(all.begin(), all.end()) == all.end(), "two streams have one id");
}

FOO_TEST(threads_pin_memory) {
  in_threads(kThreads, [](int thread) {
    // Each allocation needs a block that is not in the cache yet.
    std::vector<c10::DataPtr> blocks;
    for (int step = 0; step < kSteps; ++step) {
      const size_t bytes = 1 + step * 97 % 5000;
      blocks.push_back(device::pinned_memory_allocator().allocate(bytes));
      const c10::DataPtr& block = blocks.back();
      std::memset(block.get(), thread, bytes);
      TORCH_CHECK(device::is_pinned(block.get()), "not pinned");
      TORCH_CHECK(static_cast<const unsigned char*>(block.get())[bytes - 1] == thread,
                  "a block is shared");
    }
  });
  TORCH_CHECK(device::pinned_memory_stats().at("active_requests.current") == 0);
}

}  // namespace
}  // namespace foo::test
