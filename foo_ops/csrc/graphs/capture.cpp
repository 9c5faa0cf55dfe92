#include "graphs/capture.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/copy_ops.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "aten/host_call.h"
#include "aten/layouts.h"
#include "aten/observers.h"
#include "aten/operator_kinds.h"
#include "device/allocator.h"
#include "device/device.h"
#include "device/generator.h"
#include "device/guard.h"
#include "device/ownership.h"
#include "device/pinned_memory.h"
#include "launch/fork_mutex.h"
#include "launch/memory.h"

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

namespace {

struct Known {
  ForkMutex mutex;
  // Number of graphs that keep a block, by its address.
  std::unordered_map<void*, int> blocks;
};

// Never destroyed: graphs may outlive the static objects of this library.
Known& known() {
  static auto* instance = new Known();
  return *instance;
}

}  // namespace

KeptMemory::KeptMemory(void* memory) : memory_(memory) {
  const std::lock_guard lock(known().mutex);
  ++known().blocks[memory];
}

KeptMemory::KeptMemory(KeptMemory&& other) noexcept
    : memory_(std::exchange(other.memory_, nullptr)) {}

KeptMemory::~KeptMemory() {
  if (memory_ == nullptr) return;
  {
    const std::lock_guard lock(known().mutex);
    const auto found = known().blocks.find(memory_);
    if (--found->second == 0) known().blocks.erase(found);
  }
  device::free_block(memory_);
}

std::optional<KeptMemory> KeptMemory::of_other_graph(void* memory) {
  {
    const std::lock_guard lock(known().mutex);
    if (known().blocks.count(memory) == 0) return std::nullopt;
  }
  device::add_block_owner(memory);
  return KeptMemory(memory);
}

namespace {

constexpr const char* kWaits = "the host would wait for the device";
constexpr const char* kDense =
    "its tensors must be dense, got one that is quantized, sparse or nested";

bool is_pinned(const at::Tensor& tensor) {
  return tensor.has_storage() && device::is_pinned(tensor.storage().data());
}

bool is_copy(const std::string& name) {
  return name.starts_with("aten::_copy_from") || name == "aten::copy_";
}

// Memory and sizes of a tensor.
struct Place {
  explicit Place(const at::Tensor& tensor)
      : data(tensor.has_storage() ? tensor.storage().data() : nullptr), sizes(tensor.sizes()) {}
  friend bool operator==(const Place&, const Place&) = default;

  const void* data;
  at::DimVector sizes;
};

std::vector<Place> places_of(const std::vector<at::Tensor>& tensors) {
  return {tensors.begin(), tensors.end()};
}

}  // namespace

std::string refusal(const std::string& operator_name, const std::string& reason) {
  return operator_name + ": cannot be captured in a graph: " + reason;
}

Capture::Capture(c10::Stream stream, device::PoolId pool) : stream_(stream), pool_(pool) {
  for (const auto index : c10::irange(device::device_count())) {
    save(device::default_generator(index));
  }
}

void Capture::fail(const std::string& operator_name, const std::string& reason) {
  const std::string message = refusal(operator_name, reason);
  {
    const std::lock_guard lock(mutex_);
    if (!failure_) failure_ = message;
  }
  TORCH_CHECK(false, message);
}

void Capture::refuse_synchronization(const c10::OperatorHandle& op,
                                     c10::ArrayRef<c10::IValue> arguments) {
  const std::string& name = op.schema().name();
  if (name == "aten::_local_scalar_dense") fail("aten::item", kWaits);
  if (aten::ImplicitSynchronization(op).is_there(arguments)) fail(name, kWaits);
  if (name.starts_with("c10d::")) fail(name, "a collective waits for other processes");
  if (!is_copy(name)) return;
  const at::Tensor& first = arguments[0].toTensor();
  const at::Tensor& second = arguments[1].toTensor();
  if (first.device().type() == second.device().type()) return;
  const bool is_non_blocking = arguments.size() > 2 && arguments[2].toBool();
  if (!is_non_blocking || !is_pinned(is_on_foo(first) ? second : first)) {
    fail("aten::copy_", "a copy between cpu and foo needs pinned memory and non_blocking=True");
  }
}

void Capture::save(at::Generator generator) {
  const auto is_known = [&](const auto& each) { return each.first == generator; };
  if (std::any_of(generators_.begin(), generators_.end(), is_known)) return;
  const std::lock_guard lock(generator.mutex());
  generators_.emplace_back(generator, generator.get_state());
}

void Capture::save(const at::Tensor& tensor) {
  if (!tensor.has_storage() || tensor.storage().data() == nullptr) return;
  const c10::Storage& storage = tensor.storage();
  const bool is_new = is_on_foo(tensor)
                          ? is_own(storage.data())
                          : own_host_storages_.count(storage.unsafeGetStorageImpl()) > 0;
  if (is_new || saved_.count(storage.data()) > 0) return;
  std::unique_ptr<char[]> bytes(new char[storage.nbytes()]);
  const DeviceAccess access;
  std::memcpy(bytes.get(), storage.data(), storage.nbytes());
  saved_.emplace(storage.data(), Saved{storage, storage.data(), std::move(bytes)});
}

void Capture::save_what_changes(const c10::OperatorHandle& op,
                                c10::ArrayRef<c10::IValue> arguments) {
  for (const at::Tensor& tensor : written_tensors(op, arguments)) save(tensor);
  for (const c10::IValue& value : arguments) {
    if (value.isGenerator()) save(value.toGenerator());
  }
}

at::Tensor Capture::host_tensor(const std::string& operator_name, const at::Tensor& tensor) {
  const bool stays = tensor.numel() == 0 || is_pinned(tensor) ||
                     tensor.unsafeGetTensorImpl()->is_wrapped_number() ||
                     own_host_storages_.count(tensor.storage().unsafeGetStorageImpl()) > 0;
  if (stays) return tensor;
  if (tensor.dim() > 0) {
    fail(operator_name, "a tensor on the cpu would be copied to the device");
  }
  // The value becomes an argument of the kernel.
  const at::NoGradGuard no_grad;
  return tensor.clone();
}

at::Tensor Capture::borrow(const std::string& operator_name, const at::Tensor& tensor) {
  if (!is_on_foo(tensor)) return host_tensor(operator_name, tensor);
  if (!aten::is_dense(tensor)) fail(operator_name, kDense);
  const c10::Storage& storage = tensor.storage();
  // Copy-on-write memory would move when it is written: materialize it.
  void* const data = storage.mutable_data();
  const bool is_input = data != nullptr && !is_own(data);
  if (is_input && known_inputs_.insert(storage.unsafeGetStorageImpl()).second) {
    if (auto kept = KeptMemory::of_other_graph(data)) {
      recording_.memory.push_back(std::move(*kept));
    } else {
      recording_.inputs.push_back({storage.getWeakStorageImpl(), data, operator_name});
    }
  }
  return borrower_.borrow(tensor);
}

torch::jit::Stack Capture::borrow(const c10::OperatorHandle& op,
                                  c10::ArrayRef<c10::IValue> arguments) {
  torch::jit::Stack borrowed(arguments.begin(), arguments.end());
  for (c10::IValue& value : borrowed) {
    aten::replace_tensors(
        value, [&](const at::Tensor& tensor) { return borrow(op.schema().name(), tensor); });
  }
  return borrowed;
}

at::Tensor Capture::outcome(const std::string& operator_name, const at::Tensor& tensor) {
  if (is_on_foo(tensor)) {
    if (!aten::is_dense(tensor)) fail(operator_name, kDense);
    return borrower_.borrow(tensor);
  }
  if (tensor.has_storage()) own_host_storages_.insert(tensor.storage().unsafeGetStorageImpl());
  return tensor;
}

// Memory in none of the results was only for the operator, which may have kept it.
void Capture::keep(OperatorStep& step, device::AllocationScript allocations,
                   const std::vector<at::Tensor>& outcome) {
  for (device::ScriptedAllocation& each : allocations) {
    const bool is_kept = std::any_of(outcome.begin(), outcome.end(), [&](const at::Tensor& tensor) {
      return tensor.has_storage() && tensor.storage().data() == each.memory;
    });
    if (is_kept) {
      own_memory_.insert(each.memory);
      recording_.memory.emplace_back(each.memory);
    } else {
      device::free_block(std::exchange(each.memory, nullptr));
    }
  }
  step.set_allocations(std::move(allocations));
}

void Capture::record(const c10::OperatorHandle& op, torch::jit::Stack* stack,
                     c10::function_ref<void()> run) {
  if (aten::is_view(op)) return run();
  const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
  const size_t first = stack->size() - arguments.size();
  refuse_synchronization(op, arguments);
  auto step = std::make_unique<OperatorStep>(op, borrow(op, arguments));
  save_what_changes(op, arguments);
  const std::vector<at::Tensor> written = written_tensors(op, arguments);
  const std::vector<Place> places = places_of(written);

  device::RecordedAllocations allocations;
  {
    const aten::InCapturedOperator scope;
    run();
  }

  std::vector<at::Tensor> results = tensors_of(torch::jit::last(*stack, stack->size() - first));
  std::vector<at::Tensor> outcome_of_all = results;
  outcome_of_all.insert(outcome_of_all.end(), written.begin(), written.end());
  keep(*step, allocations.take(), outcome_of_all);
  std::vector<at::Tensor> changed(written.size());
  bool has_moved = false;
  for (const auto i : c10::irange(written.size())) {
    const Place now(written[i]);
    if (now == places[i]) continue;
    changed[i] = outcome(op.schema().name(), written[i]);
    has_moved |= now.data != places[i].data;
  }
  // Operators that only change a tensor's sizes, such as transpose_, have nothing to replay.
  if (op.hasTag(at::Tag::inplace_view) && !has_moved) return;
  for (at::Tensor& result : results) result = outcome(op.schema().name(), result);
  step->set_outcome(std::move(results), std::move(changed));
  add(std::move(step));
}

at::Tensor Capture::borrow(const std::string& name, const at::Tensor& tensor, bool is_written) {
  at::Tensor borrowed = borrow(name, tensor);
  if (is_written) save(tensor);
  return borrowed;
}

void Capture::add(std::unique_ptr<Step> step) {
  const std::lock_guard lock(mutex_);
  recording_.steps.push_back(std::move(step));
}

void Capture::restore() {
  const DeviceAccess access;
  for (const auto& [data, saved] : saved_) {
    if (saved.storage.data() != data) continue;
    std::memcpy(saved.storage.mutable_data(), saved.bytes.get(), saved.storage.nbytes());
  }
  for (auto& [generator, state] : generators_) {
    const std::lock_guard lock(generator.mutex());
    generator.set_state(state);
  }
}

Recording Capture::end() {
  restore();
  TORCH_CHECK(!failure_, "graph: the capture has failed: ", *failure_);
  return std::move(recording_);
}

}  // namespace foo::graphs
