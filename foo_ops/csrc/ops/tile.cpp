#include "ops/tile.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/Parallel.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/accumulate.h>

#include <mutex>
#include <unordered_map>

#include "aten/operator_counts.h"

namespace foo {

namespace {

// A tensor that is only read must not be asked for a pointer to write to: that would copy one that
// shares its memory until it is written to.
// Of a tensor without dimensions the last one, at -1, has size 1: its row is of one element.
constexpr int64_t kNoDimensions[] = {1, 1};

View view_of(const at::Tensor& tensor, bool is_written) {
  const at::IntArrayRef sizes = tensor.sizes();
  const bool has_dimensions = tensor.dim() > 0;
  return {is_written ? tensor.mutable_data_ptr() : const_cast<void*>(tensor.const_data_ptr()),
          tensor.dim(),
          has_dimensions ? sizes.data() : kNoDimensions + 1,
          has_dimensions ? tensor.strides().data() : kNoDimensions + 1,
          tensor.numel(),
          c10::multiply_integers(sizes.begin(), sizes.empty() ? sizes.end() : sizes.end() - 1)};
}

using Tensors = c10::SmallVector<at::Tensor, 8>;

struct Layout {
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  at::ScalarType dtype;
};

// Of all results of a call. Calls share one that is remembered.
using Layouts = std::shared_ptr<const std::vector<Layout>>;

// What a fake kernel depends on: all but the contents of tensors.
using Question = c10::SmallVector<int64_t, 48>;

struct QuestionHash {
  size_t operator()(const Question& question) const {
    size_t hash = question.size();
    for (const int64_t number : question) hash = c10::hash_combine(hash, size_t(number));
    return hash;
  }
};

void ask_tensor(Question& question, const at::Tensor& tensor) {
  question.push_back(int64_t(tensor.scalar_type()));
  question.push_back(tensor.dim());
  question.append(tensor.sizes().begin(), tensor.sizes().end());
  question.append(tensor.strides().begin(), tensor.strides().end());
}

at::Tensor without_data(const at::Tensor& tensor) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
}

// The layouts of an operator's results, as its fake kernel says. It is called once for arguments
// of the same shapes and values, since it is Python.
class ResultLayouts {
 public:
  explicit ResultLayouts(c10::OperatorHandle op) : op_(std::move(op)) {}

  // Without arguments `out`.
  Layouts of(c10::ArrayRef<c10::IValue> arguments) {
    Question question;
    for (const c10::IValue& argument : arguments) {
      if (argument.isTensor()) {
        ask_tensor(question, argument.toTensor());
      } else if (argument.isNone()) {
        question.push_back(-1);
      } else {
        question.push_back(-2);
        question.push_back(scalar_bits(argument));
      }
    }
    {
      const std::lock_guard lock(mutex_);
      const auto known = answers_.find(question);
      if (known != answers_.end()) return known->second;
    }
    const auto answer = std::make_shared<const std::vector<Layout>>(ask_fake_kernel(arguments));
    const std::lock_guard lock(mutex_);
    if (answers_.size() >= kMostAnswers) answers_.clear();
    answers_.emplace(question, answer);
    return answer;
  }

 private:
  // Some megabytes at most.
  static constexpr size_t kMostAnswers = 4096;

  std::vector<Layout> ask_fake_kernel(c10::ArrayRef<c10::IValue> arguments) const {
    const std::string name = c10::toString(op_.operator_name());
    TORCH_CHECK(op_.hasKernelForDispatchKey(c10::DispatchKey::Meta), name,
                ": the results of a tile kernel are allocated as the operator's fake kernel says, "
                "and it has none: register one with foo_ops.library.register_fake");
    torch::jit::Stack stack;
    for (const c10::IValue& argument : arguments) {
      stack.push_back(argument.isTensor() ? without_data(argument.toTensor()) : argument);
    }
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
    std::vector<Layout> layouts;
    for (const c10::IValue& result : stack) {
      const at::Tensor& tensor = result.toTensor();
      TORCH_CHECK_TYPE(tensor.defined(), name, ": its fake kernel must return a tensor, got None");
      layouts.push_back({tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type()});
    }
    return layouts;
  }

  c10::OperatorHandle op_;
  std::mutex mutex_;
  std::unordered_map<Question, Layouts, QuestionHash> answers_;
};

aten::OperatorCount* count_of(const c10::OperatorHandle& op) {
  return &aten::operator_count(c10::toString(op.operator_name()));
}

at::Tensor allocate(const Layout& layout, c10::Device device) {
  return at::empty_strided(layout.sizes, layout.strides,
                           at::TensorOptions().dtype(layout.dtype).device(device));
}

// Whether elements of an argument may be elements of an input, other than itself.
bool overlaps_another(const at::Tensor& target, c10::ArrayRef<c10::IValue> inputs, size_t index) {
  for (size_t other = 0; other < inputs.size(); ++other) {
    if (other != index && inputs[other].isTensor() &&
        target.is_alias_of(inputs[other].toTensor()) &&
        at::get_overlap_status(target, inputs[other].toTensor()) != at::MemOverlapStatus::No) {
      return true;
    }
  }
  return false;
}

bool has_contiguous_rows(const at::Tensor& tensor) {
  return tensor.dim() == 0 || tensor.size(-1) <= 1 || tensor.stride(-1) == 1;
}

// The arguments of one call of a kernel.
class Call {
 public:
  void add_tensor(const at::Tensor& tensor, bool is_written) {
    tensors_.push_back(tensor);
    is_written_.push_back(is_written);
    numbers_.push_back(0);
    tensor_of_.push_back(int64_t(tensors_.size()) - 1);
    signature_.push_back(int8_t(tensor.scalar_type()));
  }

  void add_scalar(const c10::IValue& value, bool is_optional) {
    numbers_.push_back(scalar_bits(value));
    tensor_of_.push_back(-1);
    if (is_optional) signature_.push_back(kGiven);
  }

  void add_none() {
    numbers_.push_back(0);
    tensor_of_.push_back(-1);
    signature_.push_back(kAbsent);
  }

  // False, and nothing is written, where the kernel's check does not pass.
  bool run(Kernel& kernel, bool finishes) {
    auto* function = kernel.get<TileFunction>(signature_);
    c10::SmallVector<View, 8> views;
    int64_t largest = 0;
    for (size_t i = 0; i < tensors_.size(); ++i) {
      views.push_back(view_of(tensors_[i], is_written_[i]));
      largest = std::max(largest, tensors_[i].numel());
    }
    for (size_t i = 0; i < numbers_.size(); ++i) {
      if (tensor_of_[i] >= 0) numbers_[i] = reinterpret_cast<int64_t>(&views[tensor_of_[i]]);
    }
    int64_t tiles = 0;
    function(numbers_.data(), &tiles, 0, 0);
    if (tiles < 0) return false;
    const int64_t grain = std::max<int64_t>(1, tiles * at::internal::GRAIN_SIZE / (largest + 1));
    at::parallel_for(0, tiles, grain, [&](int64_t begin, int64_t end) {
      function(numbers_.data(), nullptr, begin, end);
    });
    if (finishes) function(numbers_.data(), nullptr, 0, -1);
    return true;
  }

 private:
  Tensors tensors_;
  c10::SmallVector<bool, 8> is_written_;
  c10::SmallVector<int64_t, 16> numbers_;
  // For each number the index of its tensor, or -1.
  c10::SmallVector<int64_t, 16> tensor_of_;
  Signature signature_;
};

// A tensor that is written, and what the kernel writes instead where it cannot write there.
struct Written {
  at::Tensor target;
  at::Tensor buffer;
};

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
        count_(key == c10::DispatchKey::PrivateUse1 ? count_of(op) : nullptr) {
    for (const auto& result : op.schema().returns()) {
      returns_argument_.push_back(result.alias_info() != nullptr);
    }
    asks_layouts_ = inputs_ < parameters_.size() ||
                    std::count(returns_argument_.begin(), returns_argument_.end(), false) > 0;
  }

  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
    if (count_ != nullptr) count_->own.fetch_add(1, std::memory_order_relaxed);
    Tensors results = launch(torch::jit::last(*stack, parameters_.size()));
    torch::jit::drop(*stack, parameters_.size());
    for (at::Tensor& result : results) stack->emplace_back(std::move(result));
  }

 private:
  // What the operator returns.
  Tensors launch(c10::ArrayRef<c10::IValue> arguments) {
    const c10::Device device = common_device(name_, parameters_, arguments);
    const auto inputs = arguments.slice(0, inputs_);
    const Layouts layouts = asks_layouts_ ? layouts_.of(inputs) : nullptr;
    Call call;
    c10::SmallVector<Written, 4> written;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      add_argument(call, written, layouts, inputs, i, arguments[i]);
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
    if (!call.run(kernel_, options_.finishes)) options_.refuse(arguments);
    for (const Written& output : written) {
      if (!output.buffer.is_same(output.target)) output.target.copy_(output.buffer);
    }
    return results;
  }

  void add_argument(Call& call, c10::SmallVectorImpl<Written>& written, const Layouts& layouts,
                    c10::ArrayRef<c10::IValue> inputs, size_t index,
                    const c10::IValue& argument) const {
    const Parameter& parameter = parameters_[index];
    if (argument.isNone()) {
      call.add_none();
    } else if (!parameter.is_tensor()) {
      call.add_scalar(argument, parameter.is_optional);
    } else if (parameter.role == Parameter::Role::kRead) {
      const at::Tensor& tensor = argument.toTensor();
      call.add_tensor(needs_copy(tensor) ? tensor.contiguous() : tensor, false);
    } else {
      const at::Tensor& target = argument.toTensor();
      written.push_back(
          {target, parameter.role == Parameter::Role::kInPlace
                       ? buffer_in_place(target, inputs, index)
                       : buffer_for_out(target, (*layouts)[written.size()], inputs, index)});
      call.add_tensor(written.back().buffer, true);
    }
  }

  bool needs_copy(const at::Tensor& tensor) const {
    return options_.contiguous_rows && !has_contiguous_rows(tensor);
  }

  // Where another input shares its memory, a kernel would read what it has written.
  at::Tensor buffer_in_place(const at::Tensor& target, c10::ArrayRef<c10::IValue> inputs,
                             size_t index) const {
    check_overlaps_not_itself(parameters_[index], target);
    if (overlaps_another(target, inputs, index)) {
      return target.clone(at::MemoryFormat::Contiguous);
    }
    return needs_copy(target) ? target.contiguous() : target;
  }

  at::Tensor buffer_for_out(const at::Tensor& target, const Layout& layout,
                            c10::ArrayRef<c10::IValue> inputs, size_t index) const {
    const Parameter& parameter = parameters_[index];
    TORCH_CHECK_TYPE(c10::canCast(layout.dtype, target.scalar_type()), name_, ": ", parameter.name,
                     " must have a dtype that ", dtype_name(layout.dtype), " can be cast to, got ",
                     dtype_name(target.scalar_type()));
    at::native::resize_output(target, layout.sizes);
    check_overlaps_not_itself(parameter, target);
    const bool is_direct = !overlaps_another(target, inputs, index) && !needs_copy(target) &&
                           target.scalar_type() == layout.dtype;
    return is_direct ? target : allocate(layout, target.device());
  }

  void check_overlaps_not_itself(const Parameter& parameter, const at::Tensor& target) const {
    TORCH_CHECK(at::has_internal_overlap(target) != at::MemOverlap::Yes, name_, ": ",
                parameter.name, " is written, and must not have elements that share memory");
  }

  std::string name_;
  std::vector<Parameter> parameters_;
  TileOptions options_;
  // Arguments that are not `out`.
  size_t inputs_;
  // For each result whether it is an argument that was written.
  c10::SmallVector<bool, 4> returns_argument_;
  bool asks_layouts_;
  // Of the operator without `out`.
  ResultLayouts layouts_;
  Kernel& kernel_;
  // On foo only.
  aten::OperatorCount* count_;
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
