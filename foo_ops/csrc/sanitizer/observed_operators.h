// Has the sanitizer called around every operator on foo, and around those of the CPU that may meet
// pinned memory. What it puts in front of kernels is gone when it is off.
#pragma once

namespace foo::sanitizer {

void observe_operators();
void stop_observing_operators();

}  // namespace foo::sanitizer
