// The kernels and settings of this folder that csrc/bindings/module.cpp registers at load, or gives
// to Python.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/FunctionRef.h>

#include <string_view>
#include <vector>

#include "aten/observers.h"

namespace foo::aten {

// Puts a kernel of foo in front of torch's for each operator of torch.distributed: any CPU backend,
// such as gloo, works on the memory of foo.
void register_collectives(c10::ArrayRef<c10::OperatorHandle> operators);

// Registers foo kernels for dtypes that an operator has on CUDA but not on the CPU.
void register_wider_kernels(c10::ArrayRef<c10::OperatorHandle> operators);

// Same for the transforms of torch.fft, which torch composes of smaller operators.
void register_half_transforms(c10::ArrayRef<c10::OperatorHandle> operators);

// Makes LSTM, GRU and RNN layers run on the CPU as a whole, with autograd's graph. They are
// composites, and on the CPU each has a path that other devices lack: all steps in one operator of
// oneDNN, or many small operators without a fallback for each. Call this when all operators of
// torch are registered.
void register_recurrent_layers();

// Replaces torch's CPU flash attention, forward and backward, by foo's kernels, until the
// registrations are destroyed.
std::vector<c10::RegistrationHandleRAII> replace_flash_attention_of_cpu();

// Whether foo::linear computes matrix products on foo, aten::mm, addmm, addmv, bmm, baddbmm and the
// operators made of them. That is the default; otherwise the CPU's kernels do, whose results are
// then equal to the last bit. Applies to all threads.
bool has_own_products();
void set_own_products(bool are_own);

// Runs a graph that Inductor has compiled to C++ for the CPU on tensors of one device of foo;
// tensors on the CPU pass unchanged. The whole graph is one call on the host: its inputs are host
// aliases, its allocations are in memory of foo, and its results become tensors of foo. `devices`
// has a letter per result: 'c' stays on the CPU, 'f' goes to foo.
Tensors run_compiled_graph(c10::Device device, const Tensors& inputs, std::string_view devices,
                           c10::function_ref<Tensors(Tensors)> run);

}  // namespace foo::aten
