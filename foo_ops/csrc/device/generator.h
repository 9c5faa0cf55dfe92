// Random numbers of device foo: equal to the CPU's for the same seed.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/GeneratorImpl.h>

namespace foo::device {

class GeneratorImpl final : public c10::GeneratorImpl {
 public:
  explicit GeneratorImpl(c10::DeviceIndex index);
  GeneratorImpl(c10::DeviceIndex index, at::Generator host);

  // Returns the generator for CPU kernels, which refuse one of another device.
  const at::Generator& host() const { return host_; }

  void set_current_seed(uint64_t seed) override;
  void set_offset(uint64_t offset) override;
  uint64_t get_offset() const override;
  uint64_t current_seed() const override;
  uint64_t seed() override;
  void set_state(const c10::TensorImpl& state) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;
  // Returns a generator that shares this one's state and its position; the setter makes this one
  // share another's state.
  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override;
  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& state) override;

  static c10::DeviceType device_type();

 private:
  GeneratorImpl* clone_impl() const override;

  at::Generator host_;
};

const at::Generator& default_generator(c10::DeviceIndex index);
at::Generator new_generator(c10::DeviceIndex index);

// Returns the CPU generator inside a generator of device foo; raises for one of another device.
const at::Generator& host_generator(const at::Generator& generator);

}  // namespace foo::device
