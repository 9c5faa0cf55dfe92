// The products of matrices on foo: aten::mm, addmm, addmv, bmm, baddbmm and what is made of them.
#pragma once

namespace foo::aten {

// Whether they are foo::linear's, as long as nobody has said otherwise, or the CPU's, whose results
// are then equal to the last bit. For all threads.
bool has_own_products();
void set_own_products(bool are_own);

}  // namespace foo::aten
