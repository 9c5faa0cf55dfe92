#include "sanitizer/sanitizer.h"

#include <c10/util/irange.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "aten/observers.h"
#include "aten/operator_kinds.h"
#include "device/device.h"
#include "device/device_memory.h"
#include "device/heap.h"
#include "device/ownership.h"
#include "device/protection.h"
#include "device/stream.h"
#include "launch/fork_mutex.h"
#include "launch/memory.h"
#include "sanitizer/operator_uses.h"

namespace foo::sanitizer {
namespace {

using aten::for_each_tensor;

// Whether a result has new memory; it may also be an argument that is returned unchanged.
bool is_new(const at::Tensor& tensor, const std::vector<const void*>& allocations) {
  return tensor.device().type() == device::kFoo && tensor.has_storage() &&
         std::find(allocations.begin(), allocations.end(), tensor.storage().data()) !=
             allocations.end();
}

}  // namespace

Stack gather_stack() {
  return torch::CapturedTraceback::gather(/*python=*/true, /*script=*/false, /*cpp=*/false);
}

Sanitizer& sanitizer() {
  static auto* instance = [] {
    // Make these first: their mutexes are locked while ours is held.
    device::memory_protection();
    device::host_protection();
    return new Sanitizer();
  }();
  return *instance;
}

void Sanitizer::start(Report report) {
  {
    const std::lock_guard lock(mutex_);
    tracker_ = Tracker();
    report_ = std::move(report);
  }
  device::memory_protection().start();
  for (c10::DeviceIndex index = 0; index < device::device_count(); ++index) {
    for (const void* memory : device::memory_of(index).used_by_host()) {
      device::memory_protection().hold_open(memory);
    }
  }
}

void Sanitizer::stop() {
  const std::lock_guard lock(mutex_);
  tracker_ = Tracker();
  device::host_protection().set({});
  device::memory_protection().stop();
}

void Sanitizer::report(const Findings& findings, Consequence consequence) {
  for (const Finding& finding : findings) report_(finding, consequence);
}

void Sanitizer::hold_open(const std::vector<const void*>& allocations) {
  for (const void* memory : allocations) {
    // Memory that was freed meanwhile has no block.
    const bool is_held = tracker_.is_allocated(memory) && device::may_be_used_by_host(memory);
    if (is_held) device::memory_protection().hold_open(memory);
  }
}

void Sanitizer::protect_pinned_memory() {
  tracker_.forget_done_launches();
  device::host_protection().set(tracker_.pinned_memory_in_use());
}

std::vector<uint32_t> Sanitizer::other_streams(c10::ArrayRef<c10::IValue> tensors,
                                               c10::Stream stream) {
  std::vector<uint32_t> others;
  for (const c10::IValue& value : tensors) {
    for_each_tensor(value, [&](const at::Tensor& tensor) {
      const c10::Device device = tensor.device();
      if (device.type() != device::kFoo || device == stream.device()) return;
      others.push_back(tracker_.clocks().number_of(device::current_stream(device.index())));
    });
  }
  return others;
}

void Sanitizer::use_arguments(const OperatorUses& uses, c10::ArrayRef<c10::IValue> arguments,
                              const LaunchPtr& launch, Findings& findings) {
  for (const auto i : c10::irange(arguments.size())) {
    const ArgumentUse use = uses.use(i, arguments);
    for_each_tensor(arguments[i], [&](const at::Tensor& tensor) {
      if (tensor.device().type() != device::kFoo) return;
      if (use.is_read) tracker_.read(tensor, launch, use.reads, findings);
      if (use.is_written) tracker_.write(tensor, launch, findings);
    });
  }
}

void Sanitizer::use_results(const OperatorUses& uses, c10::ArrayRef<c10::IValue> results,
                            const LaunchPtr& launch, std::vector<const void*> allocations) {
  for (const auto i : c10::irange(results.size())) {
    for_each_tensor(results[i], [&](const at::Tensor& tensor) {
      const bool is_written = uses.results[i] == ResultUse::kWritten ||
                              (uses.results[i] == ResultUse::kNew && is_new(tensor, allocations));
      if (is_written && !uses.leaves_memory_unwritten) return tracker_.result(tensor, launch);
      if (!tensor.has_storage()) return;
      allocations.erase(
          std::remove(allocations.begin(), allocations.end(), tensor.storage().data()),
          allocations.end());
    });
  }
  // Memory that the operator keeps without returning it.
  for (const void* memory : allocations) tracker_.written(memory);
}

void Sanitizer::end_call(const LaunchPtr& launch, const std::vector<uint32_t>& others,
                         const std::vector<const void*>& allocations) {
  for (const void* memory : allocations) tracker_.written(memory);
  for (const uint32_t other : others) {
    tracker_.clocks().stream_waits_for_stream(other, launch->moment.stream);
  }
}

void Sanitizer::call(const OperatorUses& uses, torch::jit::Stack* stack,
                     c10::function_ref<void()> run) {
  const size_t first = stack->size() - uses.arguments.size();
  call(uses, torch::jit::last(*stack, uses.arguments.size()), run,
       [&] { return torch::jit::last(*stack, stack->size() - first); });
}

void Sanitizer::call(const OperatorUses& uses, c10::ArrayRef<c10::IValue> arguments,
                     c10::function_ref<void()> run,
                     c10::function_ref<c10::ArrayRef<c10::IValue>()> results_of) {
  // Operators inside an operator belong to it.
  if (OperatorScope::is_active()) return run();
  if (aten::InCapturedOperator::is_there()) return call_captured(run, results_of);
  const auto copy = Copy::of(uses, arguments);
  const auto resize = Resize::of(uses, arguments);
  const bool waits = uses.synchronization.is_there(arguments);
  const c10::Stream stream = copy ? copy->stream() : aten::stream_of_call(arguments);
  Stack trace = gather_stack();
  LaunchPtr launch;
  Findings findings;
  std::vector<uint32_t> others;
  {
    const std::lock_guard lock(mutex_);
    others = other_streams(arguments, stream);
    for (const uint32_t other : others) {
      tracker_.clocks().stream_waits_for_stream(tracker_.clocks().number_of(stream), other);
    }
    launch = tracker_.launch(uses.name, stream, std::move(trace));
    copy ? copy->begin(tracker_, launch, findings)
         : use_arguments(uses, arguments, launch, findings);
    tracker_.end(launch, findings);
  }
  report(findings);
  const DeviceAccess access;
  OperatorScope scope;
  try {
    run();
  } catch (...) {
    const std::lock_guard lock(mutex_);
    hold_open(scope.allocations());
    end_call(launch, others, scope.allocations());
    throw;
  }
  findings.clear();
  {
    const std::lock_guard lock(mutex_);
    hold_open(scope.allocations());
    const auto results = results_of();
    use_results(uses, results, launch, scope.allocations());
    use_repeated_results(results, launch, scope.repeated_allocations(), findings);
    end_call(launch, others, {});
    end_call(launch, other_streams(results, stream), {});
    if (copy) copy->end(tracker_, launch);
    if (resize) resize->end(tracker_);
    if (waits) tracker_.clocks().host_waits_for_stream(launch->moment.stream);
    if (waits || copy) protect_pinned_memory();
  }
  report(findings);
}

void Sanitizer::use_repeated_results(c10::ArrayRef<c10::IValue> results, const LaunchPtr& launch,
                                     const std::vector<const void*>& allocations,
                                     Findings& findings) {
  if (allocations.empty()) return;
  for (const c10::IValue& result : results) {
    for_each_tensor(result, [&](const at::Tensor& tensor) {
      if (is_new(tensor, allocations)) tracker_.write(tensor, launch, findings);
    });
  }
}

void Sanitizer::call_captured(c10::function_ref<void()> run,
                              c10::function_ref<c10::ArrayRef<c10::IValue>()> results_of) {
  const DeviceAccess access;
  OperatorScope scope;
  run();
  const std::lock_guard lock(mutex_);
  hold_open(scope.allocations());
  for (const c10::IValue& result : results_of()) {
    for_each_tensor(result, [&](const at::Tensor& tensor) {
      if (is_new(tensor, scope.allocations())) tracker_.unwritten(tensor);
    });
  }
}

bool Sanitizer::watches_host() {
  if (OperatorScope::is_active()) return false;
  const std::lock_guard lock(mutex_);
  return tracker_.uses_pinned_memory();
}

void Sanitizer::call_on_cpu(const OperatorUses& uses, c10::ArrayRef<c10::IValue> arguments) {
  const auto is_of_device = [](const at::Tensor& tensor) {
    return tensor.device().type() == device::kFoo;
  };
  bool touches_device = false;
  for (const c10::IValue& argument : arguments) {
    for_each_tensor(argument,
                    [&](const at::Tensor& tensor) { touches_device |= is_of_device(tensor); });
  }
  if (touches_device) return;
  Party now{Deed::kRead, uses.name, std::nullopt, gather_stack()};
  Findings findings;
  {
    const std::lock_guard lock(mutex_);
    for (const auto i : c10::irange(arguments.size())) {
      const ArgumentUse use = uses.use(i, arguments);
      for_each_tensor(arguments[i], [&](const at::Tensor& tensor) {
        now.deed = use.is_written ? Deed::kWrite : Deed::kRead;
        if (use.is_written) return tracker_.host_write(tensor, now, findings);
        if (use.is_read) tracker_.host_read(tensor, now, findings);
      });
    }
    if (!findings.empty()) protect_pinned_memory();
  }
  report(findings, Consequence::kRaiseLater);
}

std::pair<size_t, size_t> Sanitizer::figures() {
  const std::lock_guard lock(mutex_);
  return {tracker_.allocations(), tracker_.ranges()};
}

void Sanitizer::allocated(const void* memory, size_t bytes, c10::DeviceIndex index) {
  OperatorScope::note_allocation(memory);
  const c10::Stream stream = device::current_stream(index);
  Findings findings;
  {
    const std::lock_guard lock(mutex_);
    tracker_.allocated(memory, bytes, stream, findings);
  }
  if (findings.empty()) return;
  const Stack stack = gather_stack();
  for (Finding& finding : findings) finding.now.stack = stack;
  report(findings);
}

void Sanitizer::allocated_by_host_kernel(const void* memory, size_t bytes, c10::DeviceIndex index) {
  allocated(memory, bytes, index);
  written(memory, bytes);
  // An operator decides at its end which memory stays open; recurrent layers are not operators
  // here.
  if (!OperatorScope::is_active()) device::memory_protection().hold_open(memory);
}

void Sanitizer::allocated_again(const void* memory) {
  OperatorScope::note_repeated_allocation(memory);
}

void Sanitizer::freed(const void* memory) noexcept {
  bool is_in_use = false;
  {
    const std::lock_guard lock(mutex_);
    is_in_use = tracker_.may_be_in_use(memory);
  }
  // Before the lock: this takes the GIL, whose holder may wait for the lock.
  Stack stack = is_in_use ? gather_stack() : nullptr;
  const std::lock_guard lock(mutex_);
  tracker_.freed(memory, std::move(stack));
  device::memory_protection().forget(memory);
}

void Sanitizer::written(const void* memory, size_t bytes) {
  const std::lock_guard lock(mutex_);
  tracker_.written(memory, bytes);
}

void Sanitizer::used_on(const void* memory, c10::Stream stream) {
  const std::lock_guard lock(mutex_);
  tracker_.used_on(memory, stream);
}

void Sanitizer::pinned(const void* memory, size_t bytes) {
  const std::lock_guard lock(mutex_);
  tracker_.pinned(memory, bytes);
}

void Sanitizer::unpinned(const void* memory) noexcept {
  const std::lock_guard lock(mutex_);
  tracker_.unpinned(memory);
  device::host_protection().set(tracker_.pinned_memory_in_use());
}

void Sanitizer::touched_by_host(const void* address, bool writes) {
  const Party now{writes ? Deed::kWrite : Deed::kRead, "", std::nullopt, gather_stack()};
  Findings findings;
  {
    const std::lock_guard lock(mutex_);
    findings = tracker_.touched_by_host(address, now);
    device::host_protection().set(tracker_.pinned_memory_in_use());
  }
  const bool is_of_device = device::device_of_address(address).has_value();
  report(findings, is_of_device ? Consequence::kEnd : Consequence::kRaiseLater);
}

void Sanitizer::event_recorded(const void* event, c10::Stream stream) {
  const std::lock_guard lock(mutex_);
  tracker_.clocks().record(event, tracker_.clocks().number_of(stream));
}

void Sanitizer::event_destroyed(const void* event) noexcept {
  const std::lock_guard lock(mutex_);
  tracker_.clocks().forget(event);
}

void Sanitizer::stream_waits(c10::Stream stream, const void* event) {
  const std::lock_guard lock(mutex_);
  tracker_.clocks().stream_waits(tracker_.clocks().number_of(stream), event);
}

void Sanitizer::host_waits_for_event(const void* event) {
  const std::lock_guard lock(mutex_);
  tracker_.clocks().host_waits_for_event(event);
  protect_pinned_memory();
}

void Sanitizer::host_waits_for_stream(c10::Stream stream) {
  const std::lock_guard lock(mutex_);
  tracker_.clocks().host_waits_for_stream(tracker_.clocks().number_of(stream));
  protect_pinned_memory();
}

void Sanitizer::host_waits_for_device(c10::DeviceIndex index) {
  const std::lock_guard lock(mutex_);
  tracker_.clocks().host_waits_for_device(index);
  protect_pinned_memory();
}

namespace {

// Cached: reading a schema takes longer than most calls.
const OperatorUses& uses_of(const c10::OperatorHandle& op) {
  static auto* mutex = new ForkMutex();
  static auto* known = new std::unordered_map<c10::OperatorName, std::unique_ptr<OperatorUses>>();
  const std::lock_guard lock(*mutex);
  std::unique_ptr<OperatorUses>& uses = (*known)[op.operator_name()];
  if (uses == nullptr) uses = std::make_unique<OperatorUses>(op);
  return *uses;
}

// Composites are observed when they call other operators.
bool runs_on_cpu(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(c10::DispatchKey::CPU) || op.schema().name() == "aten::copy_";
}

class Observer final : public aten::CallObserver {
 public:
  void around_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack,
                       c10::function_ref<void()> run) override {
    sanitizer().call(uses_of(op), stack, run);
  }

  // It is unknown which inputs the graph writes.
  aten::Tensors around_graph(const aten::Tensors& inputs,
                             c10::function_ref<aten::Tensors()> run) override {
    OperatorUses uses;
    uses.name = "compiled graph";
    uses.arguments = {{Reads::kNothing, true, false}};
    uses.results = {ResultUse::kNew};
    aten::Tensors results;
    std::vector<c10::IValue> boxed;
    sanitizer().call(
        uses, {c10::IValue(inputs)}, [&] { results = run(); },
        [&]() -> c10::ArrayRef<c10::IValue> {
          boxed = {c10::IValue(results)};
          return boxed;
        });
    return results;
  }

  bool sees_all_devices() override { return sanitizer().watches_host(); }

  void before_operator(const c10::OperatorHandle& op, const at::RecordFunction& call) override {
    if (!runs_on_cpu(op)) return;
    const OperatorUses& uses = uses_of(op);
    if (call.inputs().size() == uses.arguments.size()) {
      sanitizer().call_on_cpu(uses, call.inputs());
    }
  }
};

}  // namespace

void observe_operators() {
  static auto* observer = new Observer();
  aten::add_call_observer(aten::Observing::kSanitizer, *observer);
}

void stop_observing_operators() {
  aten::remove_call_observer(aten::Observing::kSanitizer);
}

}  // namespace foo::sanitizer
