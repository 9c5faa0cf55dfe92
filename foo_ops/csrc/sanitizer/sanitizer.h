// The sanitizer: watches operators, memory, streams and the host, and reports what collides.
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

// What can be done about a finding: it may raise before the operator runs, or when Python makes its
// next call, or the process ends.
enum class Consequence { kRaise, kRaiseLater, kEnd };

using Report = std::function<void(const Finding& finding, Consequence consequence)>;

class Sanitizer final : public device::Observer {
 public:
  // Starts with nothing known.
  void start(Report report);
  void stop();

  // Runs an operator with what it reads and writes.
  void call(const OperatorUses& uses, torch::jit::Stack* stack, c10::function_ref<void()> run);
  // The same for what is no operator.
  void call(const OperatorUses& uses, c10::ArrayRef<c10::IValue> arguments,
            c10::function_ref<void()> run,
            c10::function_ref<c10::ArrayRef<c10::IValue>()> results_of);
  // An operator on the CPU, which may meet pinned memory.
  void call_on_cpu(const OperatorUses& uses, c10::ArrayRef<c10::IValue> arguments);
  // Whether the host can collide with anything at all.
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

  // For tests of what a long run keeps: allocations, and ranges of bytes in them.
  std::pair<size_t, size_t> figures();

 private:
  // The current streams of the other devices that tensors lie on. A call comes after what these
  // have been given, and before what comes there next, as copies between devices do on CUDA.
  std::vector<uint32_t> other_streams(c10::ArrayRef<c10::IValue> tensors, c10::Stream stream);
  // An operator that a graph captures: on a GPU, nothing would read or write now.
  void call_captured(c10::function_ref<void()> run,
                     c10::function_ref<c10::ArrayRef<c10::IValue>()> results_of);
  // Results of a graph's operator, in memory that others may still use.
  void use_repeated_results(c10::ArrayRef<c10::IValue> results, const LaunchPtr& launch,
                            const std::vector<const void*>& allocations, Findings& findings);
  void end_call(const LaunchPtr& launch, const std::vector<uint32_t>& others,
                const std::vector<const void*>& allocations);
  void use_arguments(const OperatorUses& uses, c10::ArrayRef<c10::IValue> arguments,
                     const LaunchPtr& launch, Findings& findings);
  void use_results(const OperatorUses& uses, c10::ArrayRef<c10::IValue> results,
                   const LaunchPtr& launch, std::vector<const void*> allocations);
  void report(const Findings& findings, Consequence consequence = Consequence::kRaise);
  // Keeps memory open that code of the CPU may go on using after an operator.
  void hold_open(const std::vector<const void*>& allocations);
  // After the host has waited.
  void protect_pinned_memory();

  ForkMutex mutex_;
  Tracker tracker_;
  Report report_;
};

// It is never destroyed: storages may be freed after the static objects of this library.
Sanitizer& sanitizer();

// The Python stack of this thread.
Stack gather_stack();

}  // namespace foo::sanitizer
