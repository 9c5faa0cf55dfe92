// Matrix products on foo: aten::mm, addmm, addmv, bmm, baddbmm and the operators made of them.
#pragma once

namespace foo::aten {

// Whether foo::linear computes them, the default, or the CPU's kernels, whose results are then
// equal to the last bit. Applies to all threads.
bool has_own_products();
void set_own_products(bool are_own);

}  // namespace foo::aten
