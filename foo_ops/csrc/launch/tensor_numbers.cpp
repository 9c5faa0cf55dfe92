#include "launch/tensor_numbers.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>

#include <memory>
#include <utility>
#include <vector>

#include "launch/registration.h"

namespace foo {

namespace {

constexpr const char* kSuffix = "_number";

class NumberReader final : public c10::OperatorKernel {
 public:
  NumberReader(const c10::FunctionSchema& schema, const c10::OperatorHandle& of) : of_(of) {
    const auto& arguments = of.schema().arguments();
    for (size_t i = 0; i < arguments.size(); ++i) {
      const auto number = schema.argumentIndexWithName(arguments[i].name() + kSuffix);
      if (number.has_value()) numbers_.emplace_back(*number, i);
    }
  }

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    auto arguments = torch::jit::pop(*stack, op.schema().arguments().size());
    for (const auto& [number, place] : numbers_) {
      if (arguments[number].isNone()) continue;
      arguments[place] = arguments[number].toTensor().item().toDouble();
    }
    arguments.resize(of_.schema().arguments().size());
    {
      const at::AutoDispatchBelowAutograd guard;
      of_.callBoxed(&arguments);
    }
    for (auto& result : arguments) stack->push_back(std::move(result));
  }

 private:
  c10::OperatorHandle of_;
  std::vector<std::pair<size_t, size_t>> numbers_;
};

}  // namespace

c10::RegistrationHandleRAII register_tensor_numbers(const std::string& operator_name,
                                                    c10::DispatchKey key, const std::string& of) {
  return hold_kernel(operator_name, key,
                     c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<NumberReader>(
                         find_operator(operator_name).schema(), find_operator(of))));
}

}  // namespace foo
