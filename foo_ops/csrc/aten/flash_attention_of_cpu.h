// torch's CPU flash attention, computed by foo's kernels.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <vector>

namespace foo::aten {

// Replaces torch's kernels, forward and backward, until the registrations are destroyed.
std::vector<c10::RegistrationHandleRAII> replace_flash_attention_of_cpu();

}  // namespace foo::aten
