// Runs graphs that Inductor has compiled to C++ for tensors of foo.
//
// The code is for the CPU, and a whole graph runs as one call on the host: its inputs are host
// aliases, its allocations are in memory of foo, and its results become tensors of foo.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <string_view>

#include "aten/observers.h"

namespace foo::aten {

// Runs code for the CPU on tensors of one device of foo; tensors on the CPU pass unchanged.
// `devices` has a letter per result: 'c' stays on the CPU, 'f' goes to foo.
Tensors run_compiled_graph(c10::Device device, const Tensors& inputs, std::string_view devices,
                           c10::function_ref<Tensors(Tensors)> run);

}  // namespace foo::aten
