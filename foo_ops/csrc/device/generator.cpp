#include "device/generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/GeneratorForPrivateuseone.h>

#include <mutex>
#include <utility>
#include <vector>

#include "device/device.h"

namespace foo::device {

GeneratorImpl::GeneratorImpl(c10::DeviceIndex index)
    : GeneratorImpl(index, at::detail::createCPUGenerator()) {}

GeneratorImpl::GeneratorImpl(c10::DeviceIndex index, at::Generator host)
    : c10::GeneratorImpl(c10::Device(kFoo, index),
                         c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
      host_(std::move(host)) {}

// Callers hold this generator's mutex, and kernels hold host_'s, so each method locks the latter,
// too.

void GeneratorImpl::set_current_seed(uint64_t seed) {
  const std::lock_guard<std::mutex> lock(host_.unsafeGetGeneratorImpl()->mutex_);
  host_.set_current_seed(seed);
}

// A Mersenne Twister has no offset. Zero is accepted because unpickling sets the offset that it
// got.
void GeneratorImpl::set_offset(uint64_t offset) {
  TORCH_CHECK_VALUE(offset == 0, "foo: offset must be 0, since the generator has none, got ",
                    offset);
}

uint64_t GeneratorImpl::get_offset() const {
  return 0;
}

uint64_t GeneratorImpl::current_seed() const {
  const std::lock_guard<std::mutex> lock(host_.unsafeGetGeneratorImpl()->mutex_);
  return host_.current_seed();
}

uint64_t GeneratorImpl::seed() {
  const std::lock_guard<std::mutex> lock(host_.unsafeGetGeneratorImpl()->mutex_);
  return host_.seed();
}

void GeneratorImpl::set_state(const c10::TensorImpl& state) {
  const std::lock_guard<std::mutex> lock(host_.unsafeGetGeneratorImpl()->mutex_);
  host_.unsafeGetGeneratorImpl()->set_state(state);
}

c10::intrusive_ptr<c10::TensorImpl> GeneratorImpl::get_state() const {
  const std::lock_guard<std::mutex> lock(host_.unsafeGetGeneratorImpl()->mutex_);
  return host_.unsafeGetGeneratorImpl()->get_state();
}

c10::intrusive_ptr<c10::GeneratorImpl> GeneratorImpl::graphsafe_get_state() const {
  return c10::make_intrusive<GeneratorImpl>(device_.index(), host_);
}

void GeneratorImpl::graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& state) {
  const auto* other = dynamic_cast<const GeneratorImpl*>(state.get());
  TORCH_CHECK_VALUE(other != nullptr, "foo: state must be a generator of foo, got one of ",
                    state->device());
  host_ = other->host_;
}

c10::DeviceType GeneratorImpl::device_type() {
  return kFoo;
}

GeneratorImpl* GeneratorImpl::clone_impl() const {
  const std::lock_guard<std::mutex> lock(host_.unsafeGetGeneratorImpl()->mutex_);
  return new GeneratorImpl(device_.index(), host_.clone());
}

const at::Generator& default_generator(c10::DeviceIndex index) {
  static const auto* generators = [] {
    auto* list = new std::vector<at::Generator>();
    for (c10::DeviceIndex each = 0; each < device_count(); ++each) {
      list->push_back(new_generator(each));
    }
    return list;
  }();
  if (index == -1) index = current_device();
  check_device_index(index);
  return (*generators)[index];
}

at::Generator new_generator(c10::DeviceIndex index) {
  if (index == -1) index = current_device();
  check_device_index(index);
  return at::make_generator<GeneratorImpl>(index);
}

namespace {

struct IgnoreWarnings final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// torch gets generators from the hooks. This older registration warns that it is deprecated, but it
// also refuses any other factory.
const bool generator_registered = [] {
  IgnoreWarnings handler;
  const c10::WarningUtils::WarningHandlerGuard guard(&handler);
  at::_GeneratorRegister{&new_generator};
  return true;
}();

}  // namespace

const at::Generator& host_generator(const at::Generator& generator) {
  TORCH_CHECK(generator.device().type() == kFoo,
              "Expected a 'foo' device type for generator but found '", generator.device().type(),
              "'");
  return static_cast<GeneratorImpl*>(generator.unsafeGetGeneratorImpl())->host();
}

}  // namespace foo::device
