// Faults of memory that the sanitizer protects. All others go to whoever had them before.
#pragma once

namespace foo::device {

// Puts our handler before others, if it is not there already.
void catch_faults();
// Takes it away, unless another one has come before it.
void leave_faults();

}  // namespace foo::device
