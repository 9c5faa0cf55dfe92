#include "ops/elementwise.h"

#include <ATen/TensorIterator.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TypeProperties.h>

#include "aten/operator_counts.h"
#include "kernel_table.h"
#include "registration.h"

namespace foo {

namespace {

// TensorIterator's 2-d loop: data and strides (in bytes) stand in the order output, inputs.
using ElementwiseFunction = void(char** data, const int64_t* strides, int64_t size0, int64_t size1);

enum class Form { kFunctional, kInPlace, kOut };

struct Elementwise {
  std::string name;
  Form form;
  size_t inputs;
  std::string input_types;
  ResultTypes result_types;
  Kernel kernel;

  // Refuses inputs and outputs of the wrong dtype.
  at::ScalarType result_type(at::ScalarType common, const at::Tensor& output) const {
    const auto entry = result_types.find(common);
    TORCH_CHECK_TYPE(entry != result_types.end(), name, ": input must have ", input_types, ", got ",
                     dtype_name(common));
    TORCH_CHECK_TYPE(!output.defined() || c10::canCast(entry->second, output.scalar_type()), name,
                     ": out must have a dtype that ", dtype_name(entry->second),
                     " can be cast to, got ", dtype_name(output.scalar_type()));
    return entry->second;
  }
};

// By operator name. Entries stay for the life of the process, since kernels point to them.
std::map<std::string, std::unique_ptr<Elementwise>>& registry() {
  static auto* operators = new std::map<std::string, std::unique_ptr<Elementwise>>();
  return *operators;
}

at::ScalarType common_type(at::TensorList inputs) {
  return inputs.size() == 1 ? inputs.front().scalar_type() : at::native::result_type(inputs);
}

at::TensorIterator make_iterator(at::ScalarType result_type, const at::Tensor& output,
                                 at::ScalarType common, at::TensorList inputs) {
  at::TensorIteratorConfig config;
  config.add_output(output);
  for (const at::Tensor& input : inputs) {
    if (input.scalar_type() == common) {
      config.add_const_input(input);
    } else {
      config.add_owned_const_input(input.to(common));
    }
  }
  config.set_check_mem_overlap(output.defined())
      .check_all_same_dtype(false)
      .declare_static_dtype(result_type);
  return config.build();
}

at::Tensor launch(Elementwise& elementwise, const at::Tensor& output, at::TensorList inputs) {
  const at::ScalarType common = common_type(inputs);
  const at::ScalarType result_type = elementwise.result_type(common, output);
  if (output.defined() && output.scalar_type() != result_type) {
    const at::Tensor result = launch(elementwise, at::Tensor(), inputs);
    at::native::resize_output(output, result.sizes());
    return output.copy_(result);
  }
  auto iterator = make_iterator(result_type, output, common, inputs);
  if (iterator.numel() > 0) {
    iterator.for_each(elementwise.kernel.get<ElementwiseFunction>(common),
                      at::internal::GRAIN_SIZE);
  }
  return iterator.output();
}

class ElementwiseLauncher final : public c10::OperatorKernel {
 public:
  explicit ElementwiseLauncher(Elementwise& elementwise, aten::OperatorCount* count)
      : elementwise_(elementwise), count_(count) {}

  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
    if (count_ != nullptr) {
      count_->own.fetch_add(1, std::memory_order_relaxed);
    }
    at::Tensor output;
    if (elementwise_.form == Form::kOut) {
      output = torch::jit::pop(*stack).toTensor();
    }
    c10::SmallVector<at::Tensor, 3> inputs;
    for (size_t i = 0; i < elementwise_.inputs; ++i) {
      inputs.push_back(std::move(torch::jit::peek(*stack, i, elementwise_.inputs)).toTensor());
    }
    torch::jit::drop(*stack, elementwise_.inputs);
    if (elementwise_.form == Form::kInPlace) {
      output = inputs.front();
    }
    torch::jit::push(*stack, launch(elementwise_, output, inputs));
  }

 private:
  Elementwise& elementwise_;
  // On foo only.
  aten::OperatorCount* count_;
};

Form form_of(const c10::FunctionSchema& schema) {
  if (!schema.is_mutable()) {
    return Form::kFunctional;
  }
  return schema.arguments().back().kwarg_only() ? Form::kOut : Form::kInPlace;
}

}  // namespace

void register_elementwise(const std::string& operator_name, const std::string& kernel,
                          ResultTypes result_types, const std::string& inputs) {
  const auto op = find_operator(operator_name);
  const std::string& qualified = op.schema().name();
  const Form form = form_of(op.schema());
  auto& entry = registry()[operator_name];
  entry.reset(new Elementwise{
      .name = qualified.substr(qualified.rfind(':') + 1),
      .form = form,
      .inputs = op.schema().arguments().size() - (form == Form::kOut ? 1 : 0),
      .input_types = inputs,
      .result_types = std::move(result_types),
      .kernel = Kernel(kernel),
  });
  auto* count = &aten::operator_count(operator_name);
  const auto register_launcher = [&](c10::DispatchKey key, aten::OperatorCount* key_count) {
    register_kernel(operator_name, key,
                    c10::KernelFunction::makeFromBoxedFunctor(
                        std::make_unique<ElementwiseLauncher>(*entry, key_count)));
  };
  register_launcher(c10::DispatchKey::CPU, nullptr);
  register_launcher(c10::DispatchKey::PrivateUse1, count);
  if (form != Form::kFunctional) {
    register_version_counting(operator_name);
  }
}

at::ScalarType elementwise_result_type(const std::string& operator_name, at::TensorList inputs,
                                       const at::Tensor& output) {
  return registry().at(operator_name)->result_type(common_type(inputs), output);
}

}  // namespace foo
