// The threads in which torch's autograd engine runs what belongs to a device.
#pragma once

namespace foo::device {

// Returns once no thread of the engine holds anything of a backward pass that is over. The GIL must
// not be held.
void wait_for_autograd_threads();

}  // namespace foo::device
