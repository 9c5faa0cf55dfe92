// Kernels that are meant to give way to ours, so that there is no reason to warn.
#pragma once

#include <c10/util/Exception.h>

namespace foo {

// Keeps warnings of this thread back as long as it lives.
class NoWarnings {
  class Handler final : public c10::WarningHandler {
    void process(const c10::Warning&) override {}
  };

  Handler silent_;
  const c10::WarningUtils::WarningHandlerGuard handler_{&silent_};
  // A warning that is given only once must not be used up here.
  const c10::WarningUtils::WarnAlways always_;
};

}  // namespace foo
