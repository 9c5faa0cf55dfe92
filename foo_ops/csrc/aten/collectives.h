// torch.distributed on tensors of foo: any backend for the CPU, such as gloo, works on their
// memory.
#pragma once

namespace foo::aten {

// Puts a kernel of foo in front of torch's for each collective.
void register_collectives();

}  // namespace foo::aten
