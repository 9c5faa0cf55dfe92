#include "graphs/step.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/copy_ops.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <utility>

#include "aten/host_call.h"
#include "aten/operator_kinds.h"
#include "device/allocator.h"
#include "device/device.h"
#include "device/guard.h"

namespace foo::graphs {

at::Tensor borrow(const at::Tensor& tensor, const c10::Storage& storage) {
  at::Tensor result = aten::with_storage(tensor, storage, c10::DispatchKey::PrivateUse1);
  // Some kernels compute data for the backward pass only then.
  if (tensor.requires_grad()) result.set_requires_grad(true);
  return result;
}

c10::Storage borrow_storage(const c10::Storage& storage) {
  return device::make_storage({const_cast<void*>(storage.data()), storage.device()},
                              storage.nbytes());
}

at::Tensor Borrower::borrow(const at::Tensor& tensor) {
  const c10::Storage& storage = tensor.storage();
  // Unrelated empty tensors have the same address.
  if (storage.data() == nullptr) return graphs::borrow(tensor, borrow_storage(storage));
  c10::Storage& known = storages_[{storage.data(), storage.nbytes()}];
  if (!known) known = borrow_storage(storage);
  return graphs::borrow(tensor, known);
}

namespace {

bool is_on_foo(const at::Tensor& tensor) {
  return tensor.device().type() == device::kFoo;
}

// Copies values into tensors unless they have the same memory already.
void put_into_place(const std::vector<at::Tensor>& places, const std::vector<at::Tensor>& values) {
  for (const auto i : c10::irange(places.size())) {
    if (!places[i].defined() || places[i].numel() == 0) continue;
    if (places[i].const_data_ptr() == values[i].const_data_ptr()) continue;
    at::Tensor place = places[i];
    at::_ops::copy_::call(place, values[i], /*non_blocking=*/false);
  }
}

}  // namespace

std::vector<at::Tensor> tensors_of(c10::ArrayRef<c10::IValue> values) {
  std::vector<at::Tensor> tensors;
  for (const c10::IValue& value : values) {
    aten::for_each_tensor(value, [&](const at::Tensor& tensor) { tensors.push_back(tensor); });
  }
  return tensors;
}

std::vector<at::Tensor> written_tensors(const c10::OperatorHandle& op,
                                        c10::ArrayRef<c10::IValue> arguments) {
  std::vector<at::Tensor> written;
  for (const auto i : c10::irange(arguments.size())) {
    const c10::AliasInfo* alias = op.schema().arguments()[i].alias_info();
    // Only these operators write an argument that their schema does not mark.
    const bool is_destination = op.schema().name().starts_with("aten::_copy_from") && i == 1;
    if (!is_destination && (alias == nullptr || !alias->isWrite())) continue;
    const auto tensors = tensors_of(arguments[i]);
    written.insert(written.end(), tensors.begin(), tensors.end());
  }
  return written;
}

OperatorStep::OperatorStep(const c10::OperatorHandle& op, torch::jit::Stack arguments)
    : op_(op),
      arguments_(std::move(arguments)),
      device_(device::current_device()),
      grad_mode_(at::GradMode::is_enabled()) {}

void OperatorStep::set_outcome(std::vector<at::Tensor> results, std::vector<at::Tensor> changed) {
  results_ = std::move(results);
  changed_ = std::move(changed);
}

void OperatorStep::set_allocations(device::AllocationScript allocations) {
  allocations_ = std::move(allocations);
}

void OperatorStep::replay() const {
  torch::jit::Stack stack = arguments_;
  // Borrow again if the operator changes an argument's size or memory, so that it finds the
  // original.
  const bool changes_arguments = std::any_of(changed_.begin(), changed_.end(),
                                             [](const auto& each) { return each.defined(); });
  if (changes_arguments) {
    Borrower borrower;
    for (c10::IValue& value : stack) {
      aten::replace_tensors(value, [&](const at::Tensor& tensor) {
        return is_on_foo(tensor) ? borrower.borrow(tensor) : tensor;
      });
    }
  }
  const std::vector<at::Tensor> written =
      changes_arguments ? written_tensors(op_, stack) : std::vector<at::Tensor>();
  {
    const device::DeviceGuard device_guard(c10::Device(device::kFoo, device_));
    const at::AutoGradMode grad_mode(grad_mode_);
    const device::RepeatedAllocations repeated(allocations_);
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), &stack);
  }
  put_into_place(results_, tensors_of(stack));
  if (changes_arguments) put_into_place(changed_, written);
}

std::string OperatorStep::describe() const {
  std::string text = c10::toString(op_.operator_name());
  for (const at::Tensor& tensor : tensors_of(arguments_)) {
    text += c10::str(" ", tensor.scalar_type(), tensor.sizes());
  }
  return text;
}

}  // namespace foo::graphs
