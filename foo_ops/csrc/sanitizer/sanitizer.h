// The sanitizer: observes operators, memory, streams and the host, and reports conflicts.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/FunctionRef.h>

#include <functional>
#include <mutex>

#include "device/observer.h"
#include "launch/fork_mutex.h"
#include "sanitizer/operator_uses.h"
#include "sanitizer/tracker.h"

namespace foo::sanitizer {

// Consequence of a finding: it raises before the operator runs, or at Python's next call, or the
// process ends.
enum class Consequence { kRaise, kRaiseLater, kEnd };

using Report = std::function<void(const Finding& finding, Consequence consequence)>;

class Sanitizer final : public device::Observer {
 public:
  // Starts without any history.
  void start(Report report);
  void stop();

  // Runs an operator and tracks its reads and writes.
  void call(const OperatorUses& uses, torch::jit::Stack* stack, c10::function_ref<void()> run);
  // Same, for calls that are not operators.
  void call(const OperatorUses& uses, c10::ArrayRef<c10::IValue> arguments,
            c10::function_ref<void()> run,
            c10::function_ref<c10::ArrayRef<c10::IValue>()> results_of);
  // Tracks an operator on the CPU, which may use pinned memory.
  void call_on_cpu(const OperatorUses& uses, c10::ArrayRef<c10::IValue> arguments);
  // Whether the host can conflict with anything at all.
  bool watches_host();

  void allocated(const void* memory, size_t bytes, c10::DeviceIndex index) override;
  void allocated_by_host_kernel(const void* memory, size_t bytes, c10::DeviceIndex index) override;
  void allocated_again(const void* memory) override;
  void freed(const void* memory) noexcept override;
  void written(const void* memory, size_t bytes) override;
  void used_on(const void* memory, c10::Stream stream) override;
  void pinned(const void* memory, size_t bytes) override;
  void unpinned(const void* memory) noexcept override;
  void touched_by_host(const void* address, bool writes) override;
  void event_recorded(const void* event, c10::Stream stream) override;
  void event_destroyed(const void* event) noexcept override;
  void stream_waits(c10::Stream stream, const void* event) override;
  void host_waits_for_event(const void* event) override;
  void host_waits_for_stream(c10::Stream stream) override;
  void host_waits_for_device(c10::DeviceIndex index) override;

  // For tests of long runs: returns the numbers of known allocations and of byte ranges in them.
  std::pair<size_t, size_t> figures();

 private:
  // Returns the current streams of the other devices that the tensors are on. A call runs after the
  // earlier work of these streams and before their later work, like copies between devices on CUDA.
  std::vector<uint32_t> other_streams(c10::ArrayRef<c10::IValue> tensors, c10::Stream stream);
  // Runs an operator that a graph captures: on a GPU, nothing would be read or written now.
  void call_captured(c10::function_ref<void()> run,
                     c10::function_ref<c10::ArrayRef<c10::IValue>()> results_of);
  // Checks results of a graph's operator, in memory that others may still use.
  void use_repeated_results(c10::ArrayRef<c10::IValue> results, const LaunchPtr& launch,
                            const std::vector<const void*>& allocations, Findings& findings);
  void end_call(const LaunchPtr& launch, const std::vector<uint32_t>& others,
                const std::vector<const void*>& allocations);
  void use_arguments(const OperatorUses& uses, c10::ArrayRef<c10::IValue> arguments,
                     const LaunchPtr& launch, Findings& findings);
  void use_results(const OperatorUses& uses, c10::ArrayRef<c10::IValue> results,
                   const LaunchPtr& launch, std::vector<const void*> allocations);
  void report(const Findings& findings, Consequence consequence = Consequence::kRaise);
  // Keeps memory open that CPU code may use after an operator.
  void hold_open(const std::vector<const void*>& allocations);
  // Updates the protection after the host has waited.
  void protect_pinned_memory();

  ForkMutex mutex_;
  Tracker tracker_;
  Report report_;
};

// Never destroyed: storages may be freed after the static objects of this library.
Sanitizer& sanitizer();

// Returns the Python stack of this thread.
Stack gather_stack();

// Attaches the sanitizer to every operator on foo, and to CPU operators that may use pinned memory.
void observe_operators();
void stop_observing_operators();

}  // namespace foo::sanitizer
