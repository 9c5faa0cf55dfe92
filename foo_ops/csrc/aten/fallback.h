// Every operator without a kernel of its own on device foo: its CPU kernel over the same memory.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/ArrayRef.h>

namespace foo::aten {

// Does on host aliases what the CPU's kernel would. Returns false, and leaves the stack as it is,
// where that has to do it.
using HostKernel = bool(const c10::OperatorHandle& op, torch::jit::Stack& stack);

// Takes the operator's arguments from the stack, and leaves its results there. The keys are those
// of the call on foo; those of the CPU's kernel follow from them. ``own`` is tried first.
void call_on_host(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack,
                  HostKernel* own);
void call_on_host(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack);

// The keys of the CPU for the kind of tensor that keys of foo are for: dense, sparse, ...
c10::DispatchKeySet host_keys(c10::DispatchKeySet keys);

// Where the CPU has a kernel of its own and other devices a composite of smaller operators, slower
// and with other roundings, torch would prefer the composite to a fallback: this gives foo the
// CPU's kernel, and the whole list of a _foreach_ operator to the CPU. An operator that makes a
// device's first tensor gets the CPU's kernel here, too, as no fallback may be there yet. To be
// called when all other kernels of foo are registered.
void register_host_kernels(c10::ArrayRef<c10::OperatorHandle> operators);

}  // namespace foo::aten
