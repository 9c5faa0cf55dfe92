#include <ATen/ATen.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/autograd.h>

#include <cstring>
#include <optional>
#include <random>
#include <vector>

#include "aten/host_call.h"
#include "check.h"
#include "device/allocator.h"
#include "device/backend_meta.h"
#include "device/device.h"
#include "device/hooks.h"
#include "device/pinned_memory.h"
#include "launch/registration.h"
#include "threads.h"

namespace foo::test {
namespace {

const c10::Device kFoo(device::kFoo, 0);
const c10::Device kOther(device::kFoo, 1);

int64_t allocated(c10::DeviceIndex index) {
  return device::allocator().getDeviceStats(index).allocated_bytes[0].current;
}

int64_t reserved(c10::DeviceIndex index) {
  return device::allocator().getDeviceStats(index).reserved_bytes[0].current;
}

void check_equal(const at::Tensor& foo, const at::Tensor& cpu) {
  TORCH_CHECK(foo.device().type() == device::kFoo, "the result is on ", foo.device());
  TORCH_CHECK(at::equal(foo.cpu(), cpu), "foo has ", foo.cpu(), ", the cpu ", cpu);
}

FOO_TEST(threads_allocate_and_free_with_exact_figures) {
  in_threads(8, [](int thread) {
    std::mt19937 random(thread);
    const c10::DeviceGuard guard(thread % 2 == 0 ? kFoo : kOther);
    std::vector<std::pair<c10::DataPtr, size_t>> blocks;
    for (int step = 0; step < 3000; ++step) {
      if (blocks.size() > 30 || (!blocks.empty() && random() % 2 == 0)) {
        std::swap(blocks[random() % blocks.size()], blocks.back());
        const auto* bytes = static_cast<const unsigned char*>(blocks.back().first.get());
        for (size_t each : {size_t{0}, blocks.back().second - 1}) {
          TORCH_CHECK(bytes[each] == static_cast<unsigned char>(thread), "a block is shared");
        }
        blocks.pop_back();
      } else {
        const size_t bytes = 1 + random() % (size_t{1} << (random() % 22));
        blocks.emplace_back(device::allocator().allocate(bytes), bytes);
        std::memset(blocks.back().first.get(), thread, bytes);
      }
    }
  });
  for (const auto index : {kFoo.index(), kOther.index()}) {
    TORCH_CHECK(allocated(index) == 0, allocated(index), " bytes are left");
    TORCH_CHECK(device::allocator().getDeviceStats(index).allocation[0].current == 0);
    TORCH_CHECK(reserved(index) > 0, "nothing is in the cache");
  }
  device::allocator().emptyCache();
  TORCH_CHECK(reserved(0) == 0 && reserved(1) == 0, "the cache is not empty");
}

FOO_TEST(out_of_memory_is_raised_and_survived) {
  const size_t total = device::allocator().getMemoryInfo(0).second;
  device::set_memory_fraction(double(64 << 20) / double(total), 0);
  const at::Tensor kept = at::ones({1000}, kFoo);
  check_raises<c10::OutOfMemoryError>([] { at::empty({int64_t{1} << 30}, kFoo); },
                                      "foo out of memory. Tried to allocate 4.00 GiB");
  device::set_memory_fraction(1, 0);
  check_equal(kept + at::ones({1000}, kFoo), at::full({1000}, 2.f));
}

FOO_TEST(the_fallback_writes_back_sizes_and_storages) {
  at::Tensor result = at::empty({0}, kOther);
  at::add_out(result, at::ones({3, 5}, kOther), at::ones({5}, kOther));
  check_equal(result, at::full({3, 5}, 2.f));
  TORCH_CHECK(result.device() == kOther, "the result is on ", result.device());
  result.resize_({70, 50}).fill_(1);
  check_equal(result.sum(), at::scalar_tensor(3500.f));
  at::Tensor strided = at::arange(24, kFoo).view({4, 6}).t().slice(0, 1, 6, 2);
  check_equal(strided.cumsum(0), at::arange(24).view({4, 6}).t().slice(0, 1, 6, 2).cumsum(0));
}

FOO_TEST(copies_carry_out_pending_operations) {
  const at::Tensor cpu = at::randn({4, 3}, at::kComplexDouble);
  const at::Tensor foo = cpu.to(kFoo);
  check_equal(foo.conj().t().to(kOther), cpu.conj().t().resolve_conj());
  check_equal(at::imag(foo.conj()).clone(), at::imag(cpu.conj()).resolve_neg());
}

FOO_TEST(other_layouts_keep_their_parts) {
  const at::Tensor cpu = at::eye(5) * 3;
  check_equal(cpu.to(kFoo).to_sparse().coalesce().to_dense(), cpu);
  check_equal(cpu.to(kFoo).to_sparse_csr().to_dense(), cpu);
  const at::Tensor quantized = at::quantize_per_channel(
      cpu.to(kFoo), at::full({5}, 0.5, kFoo), at::zeros({5}, kFoo).to(at::kLong), 0, at::kQInt8);
  check_equal(quantized.dequantize(), cpu);
}

FOO_TEST(gradients_flow) {
  const at::Tensor input = at::randn({2, 3, 8, 8}, at::kDouble);
  const at::Tensor weight = at::randn({4, 3, 3, 3}, at::kDouble);
  std::vector<at::Tensor> gradients;
  for (const auto device : {c10::Device(c10::kCPU), kFoo}) {
    const at::Tensor leaf = weight.to(device).requires_grad_();
    const at::Tensor loss = at::conv2d(input.to(device), leaf).relu().square().sum();
    gradients.push_back(torch::autograd::grad({loss}, {leaf})[0]);
  }
  check_equal(gradients[1], gradients[0]);
}

FOO_TEST(threads_compute) {
  in_threads(8, [](int thread) {
    const c10::DeviceGuard guard(thread % 2 == 0 ? kFoo : kOther);
    at::Tensor sum = at::zeros({100, 100}, c10::Device(device::kFoo));
    for (int step = 0; step < 100; ++step)
      sum = sum + at::ones_like(sum).matmul(at::ones_like(sum));
    TORCH_CHECK(sum.eq(10000).all().item<bool>(), "wrong sums in thread ", thread);
  });
}

FOO_TEST(generators_have_the_numbers_of_the_cpu) {
  at::Generator generator = at::globalContext().getAcceleratorHooksInterface().getNewGenerator(1);
  generator.set_current_seed(7);
  at::Generator host = at::make_generator<at::CPUGeneratorImpl>(7);
  check_equal(at::randn({100}, generator, kOther), at::randn({100}, host));
  at::Generator clone = generator.clone();
  check_equal(at::randn({5}, clone, kOther), at::randn({5}, host));
}

FOO_TEST(a_second_factory_of_generators_is_refused) {
  const auto factory = [](c10::DeviceIndex) { return at::Generator(); };
  check_raises<c10::Error>([&] { at::_GeneratorRegister{factory}; }, "once");
}

FOO_TEST(second_hooks_are_refused) {
  device::Hooks hooks;
  check_raises<c10::Error>([&] { at::RegisterPrivateUse1HooksInterface(&hooks); }, "once");
}

FOO_TEST(streams_and_events_restore_and_measure) {
  const c10::impl::VirtualGuardImpl guard(device::kFoo);
  const c10::Stream before = guard.getStream(kOther);
  const c10::Stream stream = guard.getNewStream(kOther);
  try {
    const c10::StreamGuard inside(stream);
    TORCH_CHECK(guard.getStream(kOther) == stream && guard.getDevice() == kOther);
    throw std::runtime_error("leave");
  } catch (const std::runtime_error&) {
  }
  TORCH_CHECK(guard.getStream(kOther) == before && guard.getDevice() == kFoo);
  c10::Event start(device::kFoo, c10::EventFlag::BACKEND_DEFAULT);
  c10::Event end(device::kFoo, c10::EventFlag::BACKEND_DEFAULT);
  start.record(stream);
  end.record(stream);
  end.block(before);
  end.synchronize();
  TORCH_CHECK(end.query() && start.elapsedTime(end) >= 0);
  check_raises<c10::Error>([&] { guard.getNewStream({device::kFoo, 9}); },
                           "device index must be from 0 to 1, got 9");
}

FOO_TEST(pinned_memory_is_cached) {
  auto& allocator = device::pinned_memory_allocator();
  void* first = nullptr;
  {
    const c10::DataPtr block = allocator.allocate(5000);
    first = block.get();
    std::memset(first, 1, 5000);
    TORCH_CHECK(device::is_pinned(static_cast<char*>(first) + 4999), "not pinned");
  }
  TORCH_CHECK(allocator.allocate(5000).get() == first, "the block was not used again");
  int elsewhere = 0;
  TORCH_CHECK(!device::is_pinned(&elsewhere));
}

FOO_TEST(metadata_goes_with_the_memory) {
  const at::Tensor tensor = at::ones({4}, kFoo);
  device::set_backend_meta(tensor, 1, 29);
  TORCH_CHECK(device::get_backend_meta(tensor.to(kOther).view({2, 2})) == device::Format(1, 29));
  TORCH_CHECK(!device::get_backend_meta(tensor + tensor).has_value());
}

FOO_TEST(a_negation_that_a_kernel_leaves_pending_is_kept) {
  const at::Tensor tensor = at::ones({2}, kFoo);
  {
    aten::HostCall call(kFoo);
    call.to_host(tensor)._set_neg(true);
    call.write_back();
  }
  TORCH_CHECK(tensor.is_neg());
  check_equal(tensor + 0, at::full({2}, -1.0));
}

FOO_TEST(a_host_alias_outlives_its_call) {
  at::Tensor host;
  const void* memory = nullptr;
  {
    const at::Tensor tensor = at::ones({1000}, kOther);
    memory = tensor.data_ptr();
    host = aten::HostCall(kOther).to_host(tensor);
  }
  TORCH_CHECK(host.is_cpu() && host.data_ptr() == memory);
  const std::optional<at::Tensor> foo = aten::foo_tensor_over(host);
  TORCH_CHECK(foo.has_value() && foo->device() == kOther && foo->data_ptr() == memory);
  host.reset();
  check_equal(*foo, at::ones({1000}));
  TORCH_CHECK(!aten::foo_tensor_over(at::ones({1})).has_value());
}

FOO_TEST(operators_are_counted) {
  reset_operator_counts();
  (at::ones({4}, kFoo) + 1).view({2, 2});
  const auto counts = operator_counts();
  TORCH_CHECK((counts.at("aten::add.Tensor") == std::pair<int64_t, int64_t>(0, 1)));
  TORCH_CHECK((counts.at("aten::view") == std::pair<int64_t, int64_t>(1, 0)));
}

}  // namespace
}  // namespace foo::test
