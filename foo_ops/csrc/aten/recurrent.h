// LSTM, GRU and RNN layers run on the CPU as a whole, with autograd's graph.
//
// They are composites, and on the CPU each has a path that other devices lack: all steps in one
// operator of oneDNN, or many small operators without a fallback for each.

#pragma once

namespace foo::aten {

// Call this when all operators of torch are registered.
void register_recurrent_layers();

}  // namespace foo::aten
