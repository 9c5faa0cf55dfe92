// The sanitizer's place around every operator on foo, and around those of the CPU that may meet
// pinned memory.
#pragma once

namespace foo::sanitizer {

void observe_operators();
void stop_observing_operators();

}  // namespace foo::sanitizer
