// Puts observers around every operator on foo: what stands in front of kernels for that is gone
// when the last one leaves.
#pragma once

#include "aten/observers.h"

namespace foo::aten {

// Nobody of its kind may be there.
void add_call_observer(Observing kind, CallObserver& observer);
void remove_call_observer(Observing kind);

}  // namespace foo::aten
