// Layers of LSTM, GRU and RNN go to the CPU as a whole, with autograd's graph.
//
// They are composites, and on the CPU each takes a path that other devices have not: all steps in
// one operator of oneDNN, or many small operators without a fallback for each.

#pragma once

namespace foo::aten {

// To be called when all operators of torch are registered.
void register_recurrent_layers();

}  // namespace foo::aten
