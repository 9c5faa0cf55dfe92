// Runs every operator without a foo kernel of its own: with its CPU kernel over the same memory. An
// operator without a CPU kernel is refused.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/ArrayRef.h>

#include <string>

namespace foo::aten {

// Replaces the CPU's kernel, on host aliases. Returns false, with the stack unchanged, to leave the
// call to the CPU's kernel.
using HostKernel = bool(const c10::OperatorHandle& op, torch::jit::Stack& stack);

// Pops the operator's arguments from the stack and pushes its results. `keys` are those of the call
// on foo; the CPU kernel's keys follow from them. ``own`` is tried first.
void call_on_host(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack,
                  HostKernel* own);
void call_on_host(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack);

// Returns the CPU's keys for the kind of tensor of these foo keys: dense, sparse, ...
c10::DispatchKeySet host_keys(c10::DispatchKeySet keys);

// For some operators the CPU has a kernel and other devices a composite of smaller operators,
// slower and with other roundings. torch would prefer the composite to a fallback: this registers
// the CPU's kernel for foo, and sends the whole list of a _foreach_ operator to the CPU. An
// operator that makes a device's first tensor gets the CPU's kernel here, too, since no fallback
// may be registered yet. Call this after all other kernels of foo are registered.
void register_host_kernels(c10::ArrayRef<c10::OperatorHandle> operators);

// Returns the replacement of an operator that torch has only for CUDA and its libraries, for the
// message that refuses it; empty if none is known.
std::string instead_of(const c10::OperatorName& name);

}  // namespace foo::aten
