#include "launch/autograd.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/clone.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <utility>

#include "launch/backward_node.h"
#include "launch/below_autograd.h"
#include "launch/forward_mode.h"
#include "launch/gradients.h"
#include "launch/parameter.h"
#include "launch/registration.h"

namespace foo {

namespace {

using c10::DispatchKeySet;
using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

constexpr auto kAutogradKeys = {c10::DispatchKey::AutogradCPU,
                                c10::DispatchKey::AutogradPrivateUse1,
                                c10::DispatchKey::AutogradMeta};

// PyTorch accepts None for any tensor argument.
void require_tensors(const OperatorHandle& op, const Stack& stack) {
  const auto& declared = op.schema().arguments();
  const auto given = arguments_of(op, stack);
  for (size_t i = 0; i < given.size(); ++i) {
    if (!given[i].isTensor() || given[i].toTensor().defined()) continue;
    TORCH_CHECK_TYPE(declared[i].type()->kind() == c10::TypeKind::OptionalType,
                     short_name(op.schema().name()), ": ", declared[i].name(),
                     " must be a Tensor, got None");
  }
}

using Action = std::function<void(const OperatorHandle&, DispatchKeySet, Stack*)>;

// Calls without gradients and tangents are redispatched below autograd at once.
class AutogradKernel final : public c10::OperatorKernel {
 public:
  AutogradKernel(Action with_gradient, Action with_tangent)
      : with_gradient_(std::move(with_gradient)), with_tangent_(std::move(with_tangent)) {}

  void operator()(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    require_tensors(op, *stack);
    if (has_tangent(op, *stack)) {
      with_tangent_(op, keys, stack);
    } else if (needs_gradient(op, *stack)) {
      with_gradient_(op, keys, stack);
    } else {
      redispatch_below_autograd(op, keys, stack);
    }
  }

 private:
  Action with_gradient_;
  Action with_tangent_;
};

// Without this, tangents would be dropped silently, as torch.library does for its operators.
void refuse_tangents(const OperatorHandle& op, DispatchKeySet, Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, op.schema().name(),
                              ": forward-mode differentiation is not implemented; to get it, give "
                              "foo_ops.library.register_autograd a composite");
}

// Captures the kernel that the Autograd key has now.
Action registered_composite(const OperatorHandle& op, c10::DispatchKey key) {
  auto kernel = std::make_shared<c10::SafeKernelFunction>(op.getComputedKernelForDispatchKey(key));
  return [kernel](const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    kernel->callBoxed(op, keys, stack);
  };
}

void write_copy(const OperatorHandle& functional, const OperatorHandle& op, Stack* stack) {
  Stack arguments = torch::jit::pop(*stack, op.schema().arguments().size());
  const at::Tensor target = arguments.front().toTensor();
  // The formula may keep its input, which is about to be overwritten.
  arguments.front() = target.clone();
  functional.callBoxed(&arguments);
  target.copy_(arguments.front().toTensor());
  stack->emplace_back(target);
}

[[noreturn]] void refuse_out(const OperatorHandle& op, DispatchKeySet, Stack*) {
  TORCH_CHECK(false, short_name(op.schema().name()),
              "(): functions with out=... arguments don't support automatic differentiation, but "
              "one of the arguments requires grad.");
}

// Prefers a kernel that others register for all devices, as torch.library.register_autograd does,
// to a refusal. The refusal is registered on the keys of devices, since the dispatcher would warn
// if one on the key of all devices were replaced.
Action unless_registered(const Action& refuse) {
  return [refuse](const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    if (!op.hasKernelForDispatchKey(c10::DispatchKey::Autograd)) {
      refuse(op, keys, stack);
      return;
    }
    kernel_of_autograd(op).callBoxed(op, keys, stack);
  };
}

template <class MakeKernel>
Registrations register_on_autograd_keys(const std::string& operator_name, const MakeKernel& make) {
  Registrations registrations;
  const auto op = find_operator(operator_name);
  for (const auto key : kAutogradKeys) {
    registrations.push_back(
        hold_kernel(operator_name, key, c10::KernelFunction::makeFromBoxedFunctor(make(op, key))));
  }
  return registrations;
}

class VersionCounting final : public c10::OperatorKernel {
 public:
  void operator()(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    const auto written = written_tensors(op, *stack);
    {
      at::AutoDispatchBelowADInplaceOrView guard;
      op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
    }
    for (const at::Tensor& tensor : written) {
      tensor.unsafeGetTensorImpl()->bump_version();
    }
  }
};

}  // namespace

Registrations register_formula(const std::string& operator_name,
                               const std::shared_ptr<const Formula>& formula, Tangents tangents) {
  const Action record = [formula](const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    call_and_record_formula(formula, op, keys, stack);
  };
  return register_on_autograd_keys(operator_name, [&](const auto& op, auto key) {
    const bool has_composite = tangents == Tangents::kComposite;
    return std::make_unique<AutogradKernel>(
        record, has_composite ? registered_composite(op, key) : refuse_tangents);
  });
}

Registrations register_backward_operator(const std::string& operator_name,
                                         const std::string& backward_name, Tangents tangents) {
  const auto backward = std::make_shared<const BackwardOperator>(find_operator(operator_name),
                                                                 find_operator(backward_name));
  const Action push_forward = [backward](const OperatorHandle& op, DispatchKeySet keys,
                                         Stack* stack) {
    call_with_tangents(backward, op, keys, stack);
  };
  return register_on_autograd_keys(operator_name, [&](const auto& op, auto key) {
    const Action composite =
        tangents == Tangents::kComposite ? registered_composite(op, key) : Action();
    const Action with_gradient = [backward, composite](const OperatorHandle& op,
                                                       DispatchKeySet keys, Stack* stack) {
      const int64_t missing = backward->missing_gradient(arguments_of(op, *stack));
      if (missing < 0) {
        call_and_record(backward, op, keys, stack);
      } else if (composite) {
        composite(op, keys, stack);
      } else {
        TORCH_CHECK_NOT_IMPLEMENTED(false, op.schema().name(), ": ", backward->name(),
                                    " returns no gradient of ",
                                    op.schema().arguments()[missing].name());
      }
    };
    Action with_tangent = composite ? composite : refuse_tangents;
    if (tangents == Tangents::kPartialDerivatives) with_tangent = push_forward;
    return std::make_unique<AutogradKernel>(with_gradient, with_tangent);
  });
}

Registrations refuse_to_differentiate(const std::string& operator_name,
                                      const std::string& message) {
  Action record = [message](const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    call_and_record_refusal(message, op, keys, stack);
  };
  Action refuse_with = [message](const OperatorHandle&, DispatchKeySet, Stack*) {
    TORCH_CHECK_NOT_IMPLEMENTED(false, message);
  };
  const auto& arguments = find_operator(operator_name).schema().arguments();
  if (std::any_of(arguments.begin(), arguments.end(), [](const auto& it) { return it.is_out(); })) {
    record = refuse_with = refuse_out;
  }
  return register_on_autograd_keys(operator_name, [&](const auto&, auto) {
    return std::make_unique<AutogradKernel>(unless_registered(record),
                                            unless_registered(refuse_with));
  });
}

Registrations register_variant_autograd(const std::string& operator_name) {
  const bool is_out = operator_name.find('.') != std::string::npos;
  Action differentiate = refuse_out;
  if (!is_out) {
    const auto functional = find_operator(operator_name.substr(0, operator_name.size() - 1));
    differentiate = [functional](const OperatorHandle& op, DispatchKeySet, Stack* stack) {
      write_copy(functional, op, stack);
    };
  }
  return register_on_autograd_keys(operator_name, [&](const auto&, auto) {
    return std::make_unique<AutogradKernel>(differentiate, differentiate);
  });
}

c10::RegistrationHandleRAII count_versions(const std::string& operator_name) {
  return hold_kernel(
      operator_name, c10::DispatchKey::ADInplaceOrView,
      c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<VersionCounting>()));
}

}  // namespace foo
