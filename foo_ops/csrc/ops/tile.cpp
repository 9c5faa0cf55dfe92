#include "ops/tile.h"

#include <ATen/native/Resize.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <optional>

#include "launch/huge_pages.h"
#include "launch/operator_counts.h"
#include "launch/overlap.h"
#include "launch/read_once.h"
#include "ops/result_layouts.h"
#include "ops/tensor_lists.h"
#include "ops/tile_call.h"

namespace foo {

namespace {

// Undefined for a result that is not there.
at::Tensor allocate(const ResultLayout& layout, c10::Device device) {
  if (layout.dtype == at::ScalarType::Undefined) return at::Tensor();
  return in_huge_pages(at::empty_strided(layout.sizes, layout.strides,
                                         at::TensorOptions().dtype(layout.dtype).device(device)));
}

// Whether elements of an argument are elements of an input, other than itself.
bool overlaps_another(const at::Tensor& target, c10::ArrayRef<c10::IValue> inputs, size_t index) {
  for (size_t other = 0; other < inputs.size(); ++other) {
    if (other != index && inputs[other].isTensor() &&
        overlap_of(target, inputs[other].toTensor()) != Overlap::kNone) {
      return true;
    }
  }
  return false;
}

bool has_contiguous_rows(const at::Tensor& tensor) {
  return tensor.dim() == 0 || tensor.size(-1) <= 1 || tensor.stride(-1) == 1;
}

// Copies that the kernel reads in place of some arguments.
using Copies = c10::SmallVector<std::pair<size_t, at::Tensor>, 2>;

// A tensor that is written, and what the kernel writes instead where it cannot write there.
struct Written {
  at::Tensor target;
  at::Tensor buffer;
};

using AllWritten = c10::SmallVector<Written, 4>;

// The position of the first tensor that is always there, or the number of parameters.
size_t find_first_tensor(const std::vector<Parameter>& parameters) {
  const auto first = std::find_if(
      parameters.begin(), parameters.end(),
      [](const Parameter& parameter) { return parameter.is_tensor() && !parameter.is_optional; });
  return first - parameters.begin();
}

// A Scalar is given in the compute type of the first tensor.
Common common_of(const std::vector<Parameter>& parameters, size_t first_tensor,
                 c10::ArrayRef<c10::IValue> arguments) {
  if (first_tensor == parameters.size()) return {};
  return {arguments[first_tensor].toTensor().scalar_type(), &parameters[first_tensor].name};
}

class TileLauncher final : public c10::OperatorKernel {
 public:
  TileLauncher(const c10::OperatorHandle& op, c10::DispatchKey key, const std::string& kernel,
               std::vector<Parameter> parameters, TileOptions options)
      : name_(short_name(c10::toString(op.operator_name()))),
        parameters_(std::move(parameters)),
        options_(std::move(options)),
        inputs_(std::count_if(
            parameters_.begin(), parameters_.end(),
            [](const Parameter& parameter) { return parameter.role != Parameter::Role::kOut; })),
        first_tensor_(find_first_tensor(parameters_)),
        has_lists_(std::any_of(parameters_.begin(), parameters_.end(),
                               [](const Parameter& parameter) {
                                 return parameter.kind == Parameter::Kind::kTensors;
                               })),
        writes_(op.schema().is_mutable()),
        layouts_(inputs_ == parameters_.size() ? op : find_operator(op.schema().name())),
        kernel_(*new Kernel(kernel, texts_of(parameters_))),
        count_(count_for(key, c10::toString(op.operator_name()))) {
    for (const auto& result : op.schema().returns()) {
      returns_argument_.push_back(result.alias_info() != nullptr);
    }
  }

  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
    begin_call(count_);
    Tensors results = launch(torch::jit::last(*stack, parameters_.size()));
    torch::jit::drop(*stack, parameters_.size());
    for (at::Tensor& result : results) stack->emplace_back(std::move(result));
  }

 private:
  // Returns the operator's results.
  Tensors launch(c10::ArrayRef<c10::IValue> arguments) {
    const c10::Device device = common_device(name_, parameters_, arguments);
    check_generators(name_, parameters_, arguments, device);
    check_lists(arguments);
    const SharedLayouts layouts = layouts_.of(arguments.slice(0, inputs_));
    check_written(arguments, *layouts);
    std::optional<SharedMemory> shared;
    if (has_lists_ && writes_) shared.emplace(name_, parameters_, arguments);
    TileCall call;
    AllWritten written;
    Copies copies;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      add_argument(call, written, copies, *layouts, shared, arguments, i);
    }
    Tensors results;
    const auto* next_written = written.begin();
    for (size_t i = 0; i < returns_argument_.size(); ++i) {
      results.push_back(returns_argument_[i] ? (next_written++)->target
                                             : allocate((*layouts)[i], device));
      if (returns_argument_[i]) continue;
      if (results.back().defined()) {
        call.add_tensor(results.back(), true);
      } else {
        call.add_none();
      }
    }
    if (options_.repeats_written) {
      for (const Written& output : written) call.add_tensor(output.buffer, true);
    }
    for (size_t i = 0; i < options_.scratch.size(); ++i) call.add_scratch();
    if (!call.run(name_, kernel_, options_, device)) refuse(arguments, copies, device);
    move_to_targets(written);
    return results;
  }

  // Throws for a tensor that cannot be written. Nothing has been, nor has anything been resized.
  void check_written(c10::ArrayRef<c10::IValue> arguments,
                     const std::vector<ResultLayout>& layouts) const {
    for_each_written(parameters_, arguments, [&](size_t i, const at::Tensor& target) {
      const std::string& parameter = parameters_[i].name;
      if (parameters_[i].role == Parameter::Role::kOut) {
        const ResultLayout& layout = layouts[i - inputs_];
        check_can_cast(name_, parameter, layout.dtype, target);
        if (!target.sizes().equals(layout.sizes)) {
          check_resizable(name_, parameter, target, c10::fromIntArrayRefUnchecked(layout.sizes),
                          other_tensors(arguments, i));
          return;
        }
      }
      TORCH_CHECK(!overlaps_itself(target), name_, ": ", parameter,
                  " is written, and must not have elements that share memory");
      check_apart(name_, parameters_, arguments, i);
    });
  }

  void add_argument(TileCall& call, AllWritten& written, Copies& copies,
                    const std::vector<ResultLayout>& layouts,
                    const std::optional<SharedMemory>& shared, c10::ArrayRef<c10::IValue> arguments,
                    size_t index) const {
    const Parameter& parameter = parameters_[index];
    const c10::IValue& argument = arguments[index];
    if (parameter.kind == Parameter::Kind::kGenerator) {
      call.add_generator(argument);
    } else if (argument.isNone()) {
      call.add_none();
    } else if (parameter.kind == Parameter::Kind::kTensors) {
      add_list(call, written, shared, argument.toTensorVector(), index);
    } else if (!parameter.is_tensor()) {
      call.add_value(name_, kernel_, parameter, argument,
                     common_of(parameters_, first_tensor_, arguments));
    } else if (parameter.role == Parameter::Role::kRead) {
      const at::Tensor& tensor = argument.toTensor();
      if (is_checked(index, tensor)) {
        copies.emplace_back(index, read_once(tensor));
        call.add_tensor(copies.back().second, false);
      } else {
        call.add_tensor(needs_copy(tensor) ? tensor.contiguous() : tensor, false);
      }
    } else {
      const at::Tensor& target = argument.toTensor();
      const auto inputs = arguments.slice(0, inputs_);
      written.push_back(
          {target, parameter.role == Parameter::Role::kInPlace
                       ? buffer_in_place(target, inputs, index,
                                         shared.has_value() && shared->is_shared(index, 0))
                       : buffer_for_out(target, layouts[index - inputs_], inputs, index)});
      call.add_tensor(written.back().buffer, true);
    }
  }

  // Numbers that the kernel's check looks at are indices as a rule. The kernel must use
  // the same ones, whoever writes to the tensor meanwhile.
  bool is_checked(size_t index, const at::Tensor& tensor) const {
    return options_.checks[index] && at::isIntegralType(tensor.scalar_type(), true);
  }

  bool needs_copy(const at::Tensor& tensor) const {
    return options_.contiguous_rows && !has_contiguous_rows(tensor);
  }

  void check_lists(c10::ArrayRef<c10::IValue> arguments) const {
    if (!has_lists_) return;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (!arguments[i].isTensorList()) continue;
      check_list(name_, parameters_[i], arguments[i].toTensorVector());
    }
  }

  void add_list(TileCall& call, AllWritten& written, const std::optional<SharedMemory>& shared,
                std::vector<at::Tensor> tensors, size_t index) const {
    const bool is_written = parameters_[index].role != Parameter::Role::kRead;
    for (size_t i = 0; i < tensors.size(); ++i) {
      at::Tensor& tensor = tensors[i];
      const at::Tensor target = tensor;
      if (is_written && shared->is_shared(index, i)) {
        tensor = tensor.clone(at::MemoryFormat::Contiguous);
      } else if (needs_copy(tensor)) {
        tensor = tensor.contiguous();
      }
      if (is_written) written.push_back({target, tensor});
    }
    call.add_tensors(tensors, is_written);
  }

  // Where another input shares its memory, a kernel would read what it has written.
  at::Tensor buffer_in_place(const at::Tensor& target, c10::ArrayRef<c10::IValue> inputs,
                             size_t index, bool is_shared) const {
    if (is_shared || is_checked(index, target) || overlaps_another(target, inputs, index)) {
      return target.clone(at::MemoryFormat::Contiguous);
    }
    return needs_copy(target) ? target.contiguous() : target;
  }

  // One of another shape is resized when the kernel has run, which may refuse what tensors contain.
  at::Tensor buffer_for_out(const at::Tensor& target, const ResultLayout& layout,
                            c10::ArrayRef<c10::IValue> inputs, size_t index) const {
    const bool is_direct = !options_.refuses_late && target.sizes().equals(layout.sizes) &&
                           !needs_copy(target) && target.scalar_type() == layout.dtype &&
                           !overlaps_another(target, inputs, index);
    return is_direct ? target : allocate(layout, target.device());
  }

  // The kernel, or its check, cannot use what it has read.
  [[noreturn]] void refuse(c10::ArrayRef<c10::IValue> arguments, const Copies& copies,
                           c10::Device device) const {
    torch::jit::Stack seen = arguments.vec();
    for (const auto& [index, copy] : copies) seen[index] = copy.to(device);
    options_.refuse(seen);
    TORCH_CHECK(false,
                options_.refuses_late ? "a tile kernel returned False"
                                      : "a tile kernel's check did not pass",
                ", and its refuse raised nothing");
  }

  static void move_to_targets(const AllWritten& written) {
    for (const Written& output : written) {
      at::native::resize_output(output.target, output.buffer.sizes());
    }
    for (const Written& output : written) {
      if (!output.buffer.is_same(output.target)) output.target.copy_(output.buffer);
    }
  }

  std::string name_;
  std::vector<Parameter> parameters_;
  TileOptions options_;
  // Arguments that are not `out`.
  size_t inputs_;
  // The first that is always there, or the number of parameters.
  size_t first_tensor_;
  // Whether lists of tensors are among the parameters.
  bool has_lists_;
  bool writes_;
  // For each result whether it is an argument that was written.
  c10::SmallVector<bool, 4> returns_argument_;
  // The layouts of the operator without `out`.
  ResultLayouts layouts_;
  Kernel& kernel_;
  OperatorCount* count_;
};

}  // namespace

void check_tile_values(const std::string& name, const std::vector<Parameter>& parameters,
                       c10::ArrayRef<c10::IValue> arguments) {
  const Common common = common_of(parameters, find_first_tensor(parameters), arguments);
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (parameters[i].is_tensor() || arguments[i].isNone()) continue;
    if (parameters[i].kind == Parameter::Kind::kTensors) {
      check_list(name, parameters[i], arguments[i].toTensorVector());
    }
    check_value(name, parameters[i], arguments[i], common);
  }
}

c10::RegistrationHandleRAII register_tile(const std::string& operator_name, c10::DispatchKey key,
                                          const std::string& kernel,
                                          std::vector<Parameter> parameters, TileOptions options) {
  const auto op = find_operator(operator_name);
  return hold_kernel(operator_name, key,
                     c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<TileLauncher>(
                         op, key, kernel, std::move(parameters), std::move(options))));
}

}  // namespace foo
