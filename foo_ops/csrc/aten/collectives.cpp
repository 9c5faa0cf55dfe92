// torch.distributed on tensors of foo: any CPU backend, such as gloo, works on their memory.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <memory>
#include <optional>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "aten/aten.h"
#include "aten/host_call.h"
#include "aten/operator_kinds.h"
#include "device/device.h"
#include "launch/registration.h"

namespace foo::aten {
namespace {

using c10::IValue;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

// A running collective on host aliases. Callers get tensors of foo from it.
class Work final : public c10d::Work {
 public:
  Work(WorkPtr host, c10::Device device)
      : c10d::Work(-1, host->retrieveOpType()), host_(std::move(host)), to_foo_{device} {}

  bool isCompleted() override { return host_->isCompleted(); }
  bool isSuccess() const override { return host_->isSuccess(); }
  std::exception_ptr exception() const override { return host_->exception(); }
  int sourceRank() const override { return host_->sourceRank(); }
  void synchronize() override { host_->synchronize(); }
  bool wait(std::chrono::milliseconds timeout) override { return host_->wait(timeout); }
  // No stream could wait instead of the caller.
  void blockCurrentStream() override { host_->wait(); }
  void abort() override { host_->abort(); }
  FuturePtr getFutureResult() override { return host_->getFutureResult(); }
  float getDuration() const override { return host_->getDuration(); }
  uint64_t getSequencenumber() const override { return host_->getSequencenumber(); }

  std::vector<at::Tensor> result() override {
    std::vector<at::Tensor> tensors = host_->result();
    for (at::Tensor& tensor : tensors) tensor = to_foo_(tensor);
    return tensors;
  }

  FuturePtr getFuture() override {
    const FuturePtr future = host_->getFuture();
    const auto value_on_foo = [to_foo = to_foo_](c10::ivalue::Future& done) {
      IValue value = done.value();
      replace_tensors(value, to_foo);
      return value;
    };
    return future->then(value_on_foo, future->elementType());
  }

 private:
  struct ToFoo {
    c10::Device device;

    // A tensor that is not an alias is a sparse one made by gloo.
    at::Tensor operator()(const at::Tensor& host) const {
      const std::optional<at::Tensor> foo = foo_tensor_over(host);
      return foo.has_value() ? *foo : host.to(device);
    }
  };

  WorkPtr host_;
  ToFoo to_foo_;
};

c10::Device device_of_tensors(const c10::OperatorHandle& op, at::ArrayRef<IValue> arguments) {
  std::optional<c10::Device> device;
  for (const IValue& argument : arguments) {
    for_each_tensor(argument, [&](const at::Tensor& tensor) {
      TORCH_CHECK(tensor.device().type() == device::kFoo, op.schema().name(),
                  ": expected all tensors on foo, but found one on ", tensor.device());
      if (!device) device = tensor.device();
    });
  }
  return *device;
}

// torch's kernel looks up the process group's backend for foo. That is one for the CPU, and it gets
// host aliases, which live as long as the collective.
class Collective final : public c10::OperatorKernel {
 public:
  explicit Collective(c10::SafeKernelFunction torch_kernel)
      : torch_kernel_(std::move(torch_kernel)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack) {
    const size_t count = op.schema().arguments().size();
    const size_t first = stack->size() - count;
    const c10::Device device = device_of_tensors(op, torch::jit::last(*stack, count));
    HostCall call(device);
    for (size_t position = first; position < stack->size(); ++position) {
      replace_tensors((*stack)[position], [&](const at::Tensor& tensor) {
        // Materialize a copy-on-write storage now: results arrive after this call, and nothing
        // would copy them to the storage later.
        if (tensor.has_storage()) tensor.storage().mutable_data();
        return call.to_host(tensor);
      });
    }
    torch_kernel_.callBoxed(op, keys, stack);
    const WorkPtr work = stack->back().toCustomClass<c10d::Work>();
    if (keys.has_any(c10::DispatchKeySet(c10::DispatchKey::Sparse))) {
      // The result's own tensors are complete only at the end.
      work->wait();
      call.write_back();
    }
    for (size_t position = first; position < stack->size(); ++position) {
      replace_tensors((*stack)[position],
                      [&](const at::Tensor& tensor) { return call.to_foo(tensor); });
    }
    stack->back() = WorkPtr(c10::make_intrusive<Work>(work, device));
  }

 private:
  c10::SafeKernelFunction torch_kernel_;
};

// Kernels serve dense tensors, and sparse ones if the CPU accepts them.
constexpr std::pair<c10::DispatchKey, c10::DispatchKey> kKeysOfKernels[] = {
    {c10::DispatchKey::PrivateUse1, c10::DispatchKey::CPU},
    {c10::DispatchKey::SparsePrivateUse1, c10::DispatchKey::SparseCPU},
};

}  // namespace

void register_collectives(c10::ArrayRef<c10::OperatorHandle> operators) {
  const NoWarnings no_warnings;
  for (const c10::OperatorHandle& op : operators) {
    const std::string& name = op.operator_name().name;
    if (!name.starts_with("c10d::")) continue;
    if (!op.hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) continue;
    const auto torch_kernel = op.getComputedKernelForDispatchKey(c10::DispatchKey::PrivateUse1);
    for (const auto& [key, host_key] : kKeysOfKernels) {
      if (!op.hasKernelForDispatchKey(host_key)) continue;
      register_kernel(
          name, key,
          c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<Collective>(torch_kernel)));
    }
  }
}

}  // namespace foo::aten
