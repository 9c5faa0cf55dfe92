#include "ops/tile.h"

#include <ATen/Parallel.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <deque>
#include <mutex>

#include "launch/operator_counts.h"
#include "launch/overlap.h"
#include "launch/read_once.h"
#include "ops/bounds.h"
#include "ops/result_layouts.h"

namespace foo {

namespace {

// A tensor without dimensions has one row of one element: the size at -1 is 1.
constexpr int64_t kNoDimensions[] = {1, 1};

// A pointer to write to would copy a tensor that shares its memory until it is written to: one that
// is only read gives a pointer to read from.
View view_of(const at::Tensor& tensor, bool is_written, Outside& outside) {
  const at::IntArrayRef sizes = tensor.sizes();
  const bool has_dimensions = tensor.dim() > 0;
  return {is_written ? tensor.mutable_data_ptr() : const_cast<void*>(tensor.const_data_ptr()),
          tensor.dim(),
          has_dimensions ? sizes.data() : kNoDimensions + 1,
          has_dimensions ? tensor.strides().data() : kNoDimensions + 1,
          tensor.numel(),
          c10::multiply_integers(sizes.begin(), sizes.empty() ? sizes.end() : sizes.end() - 1),
          &outside};
}

using Tensors = c10::SmallVector<at::Tensor, 8>;

at::Tensor allocate(const ResultLayout& layout, c10::Device device) {
  return at::empty_strided(layout.sizes, layout.strides,
                           at::TensorOptions().dtype(layout.dtype).device(device));
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

// The arguments of one call of a kernel.
class Call {
 public:
  void add_tensor(const at::Tensor& tensor, bool is_written) {
    tensors_.push_back(tensor);
    is_written_.push_back(is_written);
    numbers_.push_back(0);
    tensor_of_.push_back(int64_t(tensors_.size()) - 1);
    signature_.push_back(int16_t(tensor.scalar_type()));
    signature_.push_back(int16_t(kRankZero - tensor.dim()));
  }

  void add_scalar(const c10::IValue& value, bool is_optional) {
    numbers_.push_back(scalar_bits(value));
    tensor_of_.push_back(-1);
    if (is_optional) signature_.push_back(kGiven);
  }

  void add_generator(const c10::IValue& generator) {
    generators_.push_back({numbers_.size(), generator});
    numbers_.push_back(0);
    tensor_of_.push_back(-1);
  }

  void add_none() {
    numbers_.push_back(0);
    tensor_of_.push_back(-1);
    signature_.push_back(kAbsent);
  }

  void add_scratch() {
    numbers_.push_back(0);
    tensor_of_.push_back(-1);
  }

  // False, and nothing is written, where the kernel's check does not pass. Throws where a kernel
  // that checks its accesses has found one outside.
  bool run(const std::string& operator_name, Kernel& kernel, const TileOptions& options,
           c10::Device device) {
    if (checks_bounds()) signature_.push_back(kChecked);
    auto* function = kernel.get<TileFunction>(signature_);
    Outside outside;
    outside.is_found = 0;
    c10::SmallVector<View, 8> views;
    int64_t largest = 0;
    for (size_t i = 0; i < tensors_.size(); ++i) {
      views.push_back(view_of(tensors_[i], is_written_[i], outside));
      largest = std::max(largest, tensors_[i].numel());
    }
    for (size_t i = 0; i < numbers_.size(); ++i) {
      if (tensor_of_[i] >= 0) numbers_[i] = reinterpret_cast<int64_t>(&views[tensor_of_[i]]);
    }
    // Of the call, then of its threads, until nothing refers to a view any more.
    std::deque<Scratch> scratch;
    const auto require_inside = [&] {
      if (outside.is_found == 0) return;
      refuse_outside(operator_name, options.names[argument_of(outside.view, views, scratch)],
                     outside);
    };
    c10::SmallVector<int64_t, 8> counts(1 + dimensions_of(options));
    function(numbers_.data(), kCountTiles, counts.data(), 0, 0);
    require_inside();
    const int64_t tiles = counts[0];
    if (tiles < 0) return false;
    const ScratchShapes of_call = scratch_shapes(operator_name, options, counts.data() + 1, true);
    const ScratchShapes of_thread =
        scratch_shapes(operator_name, options, counts.data() + 1, false);
    scratch.emplace_back(of_call, 0, outside).give(numbers_.data());
    // A call that is refused leaves the generator as it was.
    for (const auto& [index, generator] : generators_) {
      numbers_[index] = draw_seed(generator, device);
    }
    std::mutex mutex;
    const int64_t grain = std::max<int64_t>(1, tiles * at::internal::GRAIN_SIZE / (largest + 1));
    at::parallel_for(0, tiles, grain_size(grain), [&](int64_t begin, int64_t end) {
      if (of_thread.empty()) {
        function(numbers_.data(), kRunTiles, nullptr, begin, end);
        return;
      }
      auto numbers = numbers_;
      {
        const std::lock_guard lock(mutex);
        scratch.emplace_back(of_thread, at::get_thread_num() + 1, outside).give(numbers.data());
      }
      function(numbers.data(), kRunTiles, nullptr, begin, end);
    });
    require_inside();
    if (options.finishes) function(numbers_.data(), kFinishTiles, nullptr, 0, 0);
    require_inside();
    rethrow_raised();
    return true;
  }

 private:
  static int64_t dimensions_of(const TileOptions& options) {
    int64_t dimensions = 0;
    for (const ScratchOption& option : options.scratch) dimensions += option.dimensions;
    return dimensions;
  }

  // The shapes of what there is for a call, or for each thread, from the sizes of all.
  ScratchShapes scratch_shapes(const std::string& operator_name, const TileOptions& options,
                               const int64_t* sizes, bool is_per_call) const {
    ScratchShapes shapes;
    size_t argument = numbers_.size() - options.scratch.size();
    for (const ScratchOption& option : options.scratch) {
      if (option.is_per_call == is_per_call) {
        const at::Tensor& like = tensors_[tensor_of_[option.like]];
        shapes.push_back(scratch_shape(operator_name, options.names[argument], argument,
                                       like.scalar_type(), sizes, option.dimensions));
      }
      sizes += option.dimensions;
      ++argument;
    }
    return shapes;
  }

  // Which argument a view is.
  size_t argument_of(const View* view, const c10::SmallVector<View, 8>& views,
                     const std::deque<Scratch>& scratch) const {
    for (const Scratch& memory : scratch) {
      const int64_t argument = memory.argument_of(view);
      if (argument >= 0) return argument;
    }
    return std::find(tensor_of_.begin(), tensor_of_.end(), view - views.data()) -
           tensor_of_.begin();
  }

  Tensors tensors_;
  c10::SmallVector<bool, 8> is_written_;
  c10::SmallVector<int64_t, 16> numbers_;
  // For each number the index of its tensor, or -1.
  c10::SmallVector<int64_t, 16> tensor_of_;
  // The generators, and which numbers become seeds of theirs.
  c10::SmallVector<std::pair<size_t, c10::IValue>, 1> generators_;
  Signature signature_;
};

// A tensor that is written, and what the kernel writes instead where it cannot write there.
struct Written {
  at::Tensor target;
  at::Tensor buffer;
};

using AllWritten = c10::SmallVector<Written, 4>;

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
        layouts_(inputs_ == parameters_.size() ? op : find_operator(op.schema().name())),
        kernel_(*new Kernel(kernel)),
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
    const SharedLayouts layouts = layouts_.of(arguments.slice(0, inputs_));
    check_written(arguments, *layouts);
    Call call;
    AllWritten written;
    Copies copies;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      add_argument(call, written, copies, *layouts, arguments, i);
    }
    Tensors results;
    const auto* next_written = written.begin();
    for (size_t i = 0; i < returns_argument_.size(); ++i) {
      results.push_back(returns_argument_[i] ? (next_written++)->target
                                             : allocate((*layouts)[i], device));
      if (!returns_argument_[i]) call.add_tensor(results.back(), true);
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

  void add_argument(Call& call, AllWritten& written, Copies& copies,
                    const std::vector<ResultLayout>& layouts, c10::ArrayRef<c10::IValue> arguments,
                    size_t index) const {
    const Parameter& parameter = parameters_[index];
    const c10::IValue& argument = arguments[index];
    if (parameter.kind == Parameter::Kind::kGenerator) {
      call.add_generator(argument);
    } else if (argument.isNone()) {
      call.add_none();
    } else if (!parameter.is_tensor()) {
      call.add_scalar(argument, parameter.is_optional);
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
                       ? buffer_in_place(target, inputs, index)
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

  // Where another input shares its memory, a kernel would read what it has written.
  at::Tensor buffer_in_place(const at::Tensor& target, c10::ArrayRef<c10::IValue> inputs,
                             size_t index) const {
    if (is_checked(index, target) || overlaps_another(target, inputs, index)) {
      return target.clone(at::MemoryFormat::Contiguous);
    }
    return needs_copy(target) ? target.contiguous() : target;
  }

  // One of another shape is resized when the kernel has run, which may refuse what tensors contain.
  at::Tensor buffer_for_out(const at::Tensor& target, const ResultLayout& layout,
                            c10::ArrayRef<c10::IValue> inputs, size_t index) const {
    const bool is_direct = target.sizes().equals(layout.sizes) && !needs_copy(target) &&
                           target.scalar_type() == layout.dtype &&
                           !overlaps_another(target, inputs, index);
    return is_direct ? target : allocate(layout, target.device());
  }

  // The kernel's check has not passed for what it has read.
  [[noreturn]] void refuse(c10::ArrayRef<c10::IValue> arguments, const Copies& copies,
                           c10::Device device) const {
    torch::jit::Stack seen = arguments.vec();
    for (const auto& [index, copy] : copies) seen[index] = copy.to(device);
    options_.refuse(seen);
    TORCH_CHECK(false, "a tile kernel's check did not pass, and its refuse raised nothing");
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
  // For each result whether it is an argument that was written.
  c10::SmallVector<bool, 4> returns_argument_;
  // The layouts of the operator without `out`.
  ResultLayouts layouts_;
  Kernel& kernel_;
  OperatorCount* count_;
};

}  // namespace

c10::RegistrationHandleRAII register_tile(const std::string& operator_name, c10::DispatchKey key,
                                          const std::string& kernel,
                                          std::vector<Parameter> parameters, TileOptions options) {
  const auto op = find_operator(operator_name);
  return hold_kernel(operator_name, key,
                     c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<TileLauncher>(
                         op, key, kernel, std::move(parameters), std::move(options))));
}

}  // namespace foo
