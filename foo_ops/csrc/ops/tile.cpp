#include "ops/tile.h"

#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/DimVector.h>
#include <c10/util/Exception.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <optional>

#include "launch/memory.h"
#include "launch/overlap.h"
#include "launch/registration.h"
#include "ops/result_layouts.h"
#include "ops/values.h"
#include "ops/view.h"

namespace foo {

namespace {

// A cache line, so that threads and vectors do not share one.
constexpr int64_t kAlignment = 64;

ScratchPool& pool_of_tiles() {
  static auto* pool = new ScratchPool();
  return *pool;
}

}  // namespace

ScratchShape scratch_shape(const std::string& operator_name, const std::string& name,
                           size_t argument, c10::ScalarType like, const int64_t* sizes,
                           int64_t dimensions) {
  const c10::ArrayRef<int64_t> given(sizes, dimensions);
  ScratchShape shape{argument, {given.begin(), given.end()}, {}, 1, 0};
  shape.strides.resize(dimensions);
  int64_t bytes = int64_t(c10::elementSize(at::toOpMathType(like)));
  bool is_too_large = false;
  for (int64_t dimension = dimensions; dimension-- > 0;) {
    TORCH_CHECK_VALUE(given[dimension] >= 0, operator_name, ": scratch ", name,
                      " must have sizes of at least 0, got ", given);
    shape.strides[dimension] = shape.elements;
    is_too_large |= __builtin_mul_overflow(bytes, given[dimension], &bytes);
    shape.elements = bytes == 0 ? 0 : shape.elements * given[dimension];
  }
  is_too_large |= __builtin_add_overflow(bytes, kAlignment - 1, &bytes);
  TORCH_CHECK_VALUE(!is_too_large, operator_name, ": scratch ", name,
                    " must fit into the address space, got sizes ", given);
  shape.bytes = bytes / kAlignment * kAlignment;
  return shape;
}

Scratch::Scratch(const ScratchShapes& shapes, int64_t place, Outside& outside) : shapes_(shapes) {
  if (shapes.empty()) return;
  int64_t bytes = 0;
  for (const ScratchShape& shape : shapes) bytes += shape.bytes;
  auto* address = static_cast<char*>(memory_.emplace(pool_of_tiles(), place, bytes).get());
  // All bits set is a NaN: a read of uninitialized memory shows.
  if (checks_bounds()) std::memset(address, 0xff, bytes);
  for (const ScratchShape& shape : shapes) {
    const auto dimensions = int64_t(shape.sizes.size());
    const int64_t rows = c10::multiply_integers(shape.sizes.begin(), shape.sizes.end() - 1);
    views_.push_back({address, dimensions, shape.sizes.data(), shape.strides.data(), shape.elements,
                      rows, &outside});
    address += shape.bytes;
  }
}

void Scratch::give(int64_t* arguments) const {
  for (size_t i = 0; i < views_.size(); ++i) {
    arguments[shapes_[i].argument] = reinterpret_cast<int64_t>(&views_[i]);
  }
}

int64_t Scratch::argument_of(const View* view) const {
  for (size_t i = 0; i < views_.size(); ++i) {
    if (&views_[i] == view) return int64_t(shapes_[i].argument);
  }
  return -1;
}

namespace {

// A 0-d tensor has one row of one element: its size at -1 is 1.
constexpr int64_t kNoDimensions[] = {1, 1};

// A mutable pointer would copy a copy-on-write tensor: use a const pointer for tensors that are
// only read.
View view_of(const at::Tensor& tensor, bool is_written, Outside* outside) {
  const at::IntArrayRef sizes = tensor.sizes();
  const bool has_dimensions = tensor.dim() > 0;
  return {is_written ? tensor.mutable_data_ptr() : const_cast<void*>(tensor.const_data_ptr()),
          tensor.dim(),
          has_dimensions ? sizes.data() : kNoDimensions + 1,
          has_dimensions ? tensor.strides().data() : kNoDimensions + 1,
          tensor.numel(),
          c10::multiply_integers(sizes.begin(), sizes.empty() ? sizes.end() : sizes.end() - 1),
          outside};
}

// Returns the tiles of a part for a thread, given the elements of the largest argument.
int64_t grain_of(int64_t tiles, int64_t elements) {
  return grain_size(std::max<int64_t>(1, tiles * at::internal::GRAIN_SIZE / (elements + 1)));
}

int64_t dimensions_of(const TileOptions& options) {
  int64_t dimensions = 0;
  for (const ScratchOption& option : options.scratch) dimensions += option.dimensions;
  return dimensions;
}

}  // namespace

void TileCall::add_number(int64_t number) {
  numbers_.push_back(number);
  tensor_of_.push_back(-1);
}

void TileCall::add_signature(const at::Tensor& tensor) {
  signature_.push_back(int16_t(tensor.scalar_type()));
  signature_.push_back(int16_t(kRankZero - tensor.dim()));
}

void TileCall::add_tensor(const at::Tensor& tensor, bool is_written) {
  tensors_.push_back(tensor);
  is_written_.push_back(is_written);
  numbers_.push_back(0);
  tensor_of_.push_back(int64_t(tensors_.size()) - 1);
  add_signature(tensor);
}

void TileCall::add_tensors(at::TensorList tensors, bool is_written) {
  lists_.push_back({numbers_.size(), tensors_.size(), {nullptr, int64_t(tensors.size())}});
  tensors_.append(tensors.begin(), tensors.end());
  is_written_.append(tensors.size(), is_written);
  add_number(0);
  add_signature(tensors.front());
}

void TileCall::add_value(const std::string& name, const Kernel& kernel, const Parameter& parameter,
                         const c10::IValue& argument, const Common& common) {
  add_number(values_.add(name, parameter, argument, common));
  Values::sign(kernel, parameter, argument, signature_);
}

void TileCall::add_generator(const c10::IValue& generator) {
  generators_.push_back({numbers_.size(), generator});
  add_number(0);
}

void TileCall::add_none() {
  add_number(0);
  signature_.push_back(kAbsent);
}

void TileCall::add_scratch() {
  add_number(0);
}

// A kernel reads these in each call, so they lie side by side: in tensors they would be far apart.
class TileCall::Placed {
 public:
  explicit Placed(TileCall& call) {
    elements_ = call.make_views(views_, nullptr);
    numbers_ = call.numbers_;
    size_t count = 0;
    for (const View& view : views_) count += 2 * view.ndim;
    // It does not grow once views point to it.
    shapes_.reserve(count);
    for (View& view : views_) {
      keep(view.sizes, view.ndim);
      keep(view.strides, view.ndim);
    }
  }
  // Numbers point to views, and these to shapes.
  Placed(const Placed&) = delete;
  Placed& operator=(const Placed&) = delete;

  const int64_t* numbers() const { return numbers_.data(); }
  Views& views() { return views_; }
  // The largest number of elements of an argument.
  int64_t elements() const { return elements_; }

 private:
  void keep(const int64_t*& values, int64_t count) {
    if (count == 0) return;
    shapes_.append(values, values + count);
    values = shapes_.end() - count;
  }

  int64_t elements_;
  c10::SmallVector<int64_t, 16> numbers_;
  Views views_;
  c10::SmallVector<int64_t, 32> shapes_;
};

// A call of JoinedCalls.
class TileCall::Waiting {
 public:
  Waiting(TileCall call, TileFunction* function, int64_t tiles, int64_t grain)
      : function_(function),
        tiles_(tiles),
        grain_(std::min(grain, tiles)),
        placed_(call),
        call_(std::move(call)) {}

  // All but the tensors.
  static constexpr int64_t kBytesRead = 3 * sizeof(int64_t) + sizeof(Placed);

  int64_t jobs() const { return tiles_ == 0 ? 0 : (tiles_ + grain_ - 1) / grain_; }
  int64_t bytes() const { return 0; }

  // An element takes about as long as a multiplication.
  double cost(int64_t) const {
    return static_cast<double>(placed_.elements() * grain_) / static_cast<double>(tiles_);
  }

  void work(int64_t job, void*) const {
    const int64_t begin = job * grain_;
    int64_t count = 0;
    function_(placed_.numbers(), kRunTiles, &count, begin, std::min(begin + grain_, tiles_));
  }

 private:
  TileFunction* function_;
  int64_t tiles_, grain_;
  Placed placed_;
  // Holds the tensors.
  TileCall call_;
};

class TileCall::Lasting final : public LastingCall {
 public:
  Lasting(TileCall call, TileFunction* function, const std::vector<bool>& are_copies)
      : function_(function), placed_(call), call_(std::move(call)) {
    for (size_t i = 0; i < call_.tensors_.size(); ++i) {
      at::Tensor& tensor = call_.tensors_[i];
      known_.push_back(
          {tensor.key_set(), tensor.scalar_type(), are_copies[i], call_.is_written_[i]});
      if (!are_copies[i]) tensor.reset();
    }
  }

  bool run(TensorArguments arguments) override {
    if (arguments.size() != known_.size() || checks_bounds()) return false;
    for (size_t i = 0; i < known_.size(); ++i) {
      if (!known_[i].fits(*arguments[i], placed_.views()[i])) return false;
    }
    if (place(arguments)) overlaps_ = has_overlap(arguments);
    if (overlaps_) return false;
    const int64_t* const numbers = placed_.numbers();
    int64_t tiles = 0, refused = 0;
    function_(numbers, kCountTiles, &tiles, 0, 0);
    if (tiles == kRefused) return false;
    at::parallel_for(
        0, tiles, grain_of(tiles, placed_.elements()),
        [&](int64_t begin, int64_t end) { function_(numbers, kRunTiles, &refused, begin, end); });
    return true;
  }

  int64_t bytes_read() const override { return sizeof(Lasting) - sizeof(TileCall); }

 private:
  struct KnownTensor {
    c10::DispatchKeySet keys;
    c10::ScalarType dtype;
    bool is_copied, is_written;

    bool fits(const at::Tensor& tensor, const View& view) const {
      const auto dimensions = static_cast<size_t>(view.ndim);
      return (tensor.key_set() == keys || is_dense_on_cpu(tensor)) &&
             tensor.scalar_type() == dtype &&
             tensor.sizes() == at::IntArrayRef(view.sizes, dimensions) &&
             tensor.strides() == at::IntArrayRef(view.strides, dimensions);
    }
  };

  // Returns whether one of the tensors is not where it was.
  bool place(TensorArguments arguments) {
    bool has_moved = false;
    for (size_t i = 0; i < known_.size(); ++i) {
      const at::Tensor& tensor = *arguments[i];
      View& view = placed_.views()[i];
      if (known_[i].is_copied) {
        std::memcpy(view.data, tensor.const_data_ptr(), tensor.nbytes());
        continue;
      }
      void* const data = known_[i].is_written ? tensor.mutable_data_ptr()
                                              : const_cast<void*>(tensor.const_data_ptr());
      has_moved |= std::exchange(view.data, data) != data;
    }
    return has_moved;
  }

  // Whether a tensor that is written shares memory with another one.
  bool has_overlap(TensorArguments arguments) const {
    for (size_t i = 0; i < arguments.size(); ++i) {
      for (size_t j = 0; known_[i].is_written && j < arguments.size(); ++j) {
        if (i != j && overlap_of(*arguments[i], *arguments[j]) != Overlap::kNone) return true;
      }
    }
    return false;
  }

  TileFunction* function_;
  bool overlaps_ = false;
  c10::SmallVector<KnownTensor, 8> known_;
  Placed placed_;
  // Holds copies.
  TileCall call_;
};

std::unique_ptr<LastingCall> TileCall::lasting(TileCall call, Kernel& kernel,
                                               const std::vector<bool>& are_copies) {
  auto* const function = kernel.get<TileFunction>(call.signature_);
  return std::make_unique<Lasting>(std::move(call), function, are_copies);
}

bool TileCall::can_wait(const TileOptions& options) const {
  const bool has_checks =
      std::find(options.checks.begin(), options.checks.end(), true) != options.checks.end();
  return !has_checks && !options.finishes && !options.refuses_late && options.scratch.empty() &&
         lists_.empty() && generators_.empty() && !checks_bounds();
}

bool TileCall::run(const std::string& operator_name, Kernel& kernel, const TileOptions& options,
                   c10::Device device) {
  if (checks_bounds()) signature_.push_back(kChecked);
  auto* function = kernel.get<TileFunction>(signature_);
  Outside outside;
  outside.is_found = 0;
  values_.check_bounds(outside);
  Views views;
  const int64_t largest = make_views(views, &outside);
  // Scratch memory of the call, then of its threads; kept until nothing refers to a view.
  std::deque<Scratch> scratch;
  const auto require_inside = [&] {
    if (outside.is_found == 0) return;
    refuse_outside(operator_name, name_of(outside.view, views, scratch, options), outside);
  };
  c10::SmallVector<int64_t, 8> counts(1 + dimensions_of(options));
  function(numbers_.data(), kCountTiles, counts.data(), 0, 0);
  require_inside();
  const int64_t tiles = counts[0];
  if (tiles == kRefused) return false;
  TORCH_CHECK_VALUE(tiles >= 0, operator_name, ": tiles must return a number of at least 0, got ",
                    tiles);
  const int64_t grain = grain_of(tiles, largest);
  if (LoopBatch* const batch = LoopBatch::on(device); batch != nullptr && can_wait(options)) {
    std::vector<at::Tensor> tensors(tensors_.begin(), tensors_.end());
    batch->add(
        ParallelLoop(std::make_shared<const Waiting>(std::move(*this), function, tiles, grain),
                     std::move(tensors)));
    return true;
  }
  const ScratchShapes of_call = scratch_shapes(operator_name, options, counts.data() + 1, true);
  const ScratchShapes of_thread = scratch_shapes(operator_name, options, counts.data() + 1, false);
  scratch.emplace_back(of_call, 0, outside).give(numbers_.data());
  // Drawn only now: a refused call leaves the generator as it was.
  for (const auto& [index, generator] : generators_) {
    numbers_[index] = draw_seed(generator, device);
  }
  std::mutex mutex;
  at::parallel_for(0, tiles, grain, [&](int64_t begin, int64_t end) {
    if (of_thread.empty()) {
      function(numbers_.data(), kRunTiles, counts.data(), begin, end);
      return;
    }
    auto numbers = numbers_;
    {
      const std::lock_guard lock(mutex);
      scratch.emplace_back(of_thread, at::get_thread_num() + 1, outside).give(numbers.data());
    }
    function(numbers.data(), kRunTiles, counts.data(), begin, end);
  });
  require_inside();
  rethrow_raised();
  if (counts[0] == kRefused) return false;
  if (options.finishes) function(numbers_.data(), kFinishTiles, nullptr, 0, 0);
  require_inside();
  rethrow_raised();
  return true;
}

int64_t TileCall::make_views(Views& views, Outside* outside) {
  int64_t largest = 0;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    views.push_back(view_of(tensors_[i], is_written_[i], outside));
    largest = std::max(largest, tensors_[i].numel());
  }
  for (size_t i = 0; i < numbers_.size(); ++i) {
    if (tensor_of_[i] >= 0) numbers_[i] = reinterpret_cast<int64_t>(&views[tensor_of_[i]]);
  }
  for (List& list : lists_) {
    list.views.first = &views[list.begin];
    numbers_[list.number] = reinterpret_cast<int64_t>(&list.views);
    int64_t elements = 0;
    for (int64_t i = 0; i < list.views.size; ++i) elements += list.views.first[i].size;
    largest = std::max(largest, elements);
  }
  return largest;
}

ScratchShapes TileCall::scratch_shapes(const std::string& operator_name, const TileOptions& options,
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

std::string TileCall::name_of(const View* view, const Views& views,
                              const std::deque<Scratch>& scratch,
                              const TileOptions& options) const {
  for (const Scratch& memory : scratch) {
    const int64_t argument = memory.argument_of(view);
    if (argument >= 0) return options.names[argument];
  }
  if (const std::string* list = values_.name_of(view)) return *list;
  const auto place = size_t(view - views.data());
  for (const List& list : lists_) {
    if (place < list.begin || place >= list.begin + list.views.size) continue;
    return options.names[list.number] + "[" + std::to_string(place - list.begin) + "]";
  }
  const auto tensor = std::find(tensor_of_.begin(), tensor_of_.end(), int64_t(place));
  return options.names[tensor - tensor_of_.begin()];
}

namespace {

// Returns an undefined tensor for a missing result.
at::Tensor allocate(const ResultLayout& layout, c10::Device device) {
  if (layout.dtype == at::ScalarType::Undefined) return at::Tensor();
  const NewResults results;
  return at::empty_strided(layout.sizes, layout.strides,
                           at::TensorOptions().dtype(layout.dtype).device(device));
}

// Whether a written argument shares elements with another input.
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

// Copies that the kernel reads instead of some arguments.
using Copies = c10::SmallVector<std::pair<size_t, at::Tensor>, 2>;

// A written tensor, and the buffer that the kernel writes instead if it cannot write there.
struct Written {
  at::Tensor target;
  at::Tensor buffer;
};

using AllWritten = c10::SmallVector<Written, 4>;

// Returns the position of the first required tensor, or the number of parameters.
size_t find_first_tensor(const std::vector<Parameter>& parameters) {
  const auto first = std::find_if(
      parameters.begin(), parameters.end(),
      [](const Parameter& parameter) { return parameter.is_tensor() && !parameter.is_optional; });
  return first - parameters.begin();
}

// Scalars are passed in the compute type of the first tensor.
Common common_of(const std::vector<Parameter>& parameters, size_t first_tensor,
                 c10::ArrayRef<c10::IValue> arguments) {
  if (first_tensor == parameters.size()) return {};
  return {arguments[first_tensor].toTensor().scalar_type(), &parameters[first_tensor].name};
}

class TileLauncher final : public c10::OperatorKernel {
 public:
  TileLauncher(const c10::OperatorHandle& op, c10::DispatchKey key, const std::string& kernel,
               std::vector<Parameter> parameters, TileOptions options)
      : full_name_(op.operator_name().name),
        name_(short_name(full_name_)),
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
    const bool takes_generator = std::any_of(
        parameters_.begin(), parameters_.end(),
        [](const Parameter& parameter) { return parameter.kind == Parameter::Kind::kGenerator; });
    can_last_ = writes_ && returns_argument_.empty() && inputs_ == parameters_.size() &&
                !has_lists_ && !takes_generator && options_.scratch.empty() && !options_.finishes &&
                !options_.refuses_late && !options_.repeats_written;
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
    LastingCallTaker* const taker = LastingCallTaker::of(full_name_, device);
    if (taker != nullptr && can_last_ && !checks_bounds()) {
      taker->call = lasting(std::move(call), arguments, written);
    }
    return results;
  }

  // Returns nothing for a call that writes to buffers, or reads copies that no check wants.
  std::unique_ptr<LastingCall> lasting(TileCall call, c10::ArrayRef<c10::IValue> arguments,
                                       const AllWritten& written) const {
    std::vector<bool> are_copies;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (!arguments[i].isTensor()) continue;
      const at::Tensor& tensor = arguments[i].toTensor();
      const bool is_read = parameters_[i].role == Parameter::Role::kRead;
      are_copies.push_back(is_read && is_checked(i, tensor));
      const bool needs_launcher = are_copies.back() ? !tensor.is_contiguous() : needs_copy(tensor);
      if (needs_launcher) return nullptr;
    }
    for (const Written& output : written) {
      if (!output.buffer.is_same(output.target)) return nullptr;
    }
    return TileCall::lasting(std::move(call), kernel_, are_copies);
  }

  // Throws for a tensor that cannot be written. Called before anything is written or resized.
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
                  " is written, so it must not have elements that share memory");
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

  // Numbers in the kernel's check are usually indices. The kernel must use the checked values even
  // if another thread writes to the tensor meanwhile.
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

  // If another input shares the memory, the kernel would read its own results.
  at::Tensor buffer_in_place(const at::Tensor& target, c10::ArrayRef<c10::IValue> inputs,
                             size_t index, bool is_shared) const {
    if (is_shared || is_checked(index, target) || overlaps_another(target, inputs, index)) {
      return target.clone(at::MemoryFormat::Contiguous);
    }
    return needs_copy(target) ? target.contiguous() : target;
  }

  // An `out` of another shape is resized after the kernel has run, since the kernel may refuse the
  // tensors' contents.
  at::Tensor buffer_for_out(const at::Tensor& target, const ResultLayout& layout,
                            c10::ArrayRef<c10::IValue> inputs, size_t index) const {
    const bool is_direct = !options_.refuses_late && target.sizes().equals(layout.sizes) &&
                           !needs_copy(target) && target.scalar_type() == layout.dtype &&
                           !overlaps_another(target, inputs, index);
    return is_direct ? target : allocate(layout, target.device());
  }

  // Called if the kernel or its check cannot use the contents that it has read.
  [[noreturn]] void refuse(c10::ArrayRef<c10::IValue> arguments, const Copies& copies,
                           c10::Device device) const {
    torch::jit::Stack seen = arguments.vec();
    for (const auto& [index, copy] : copies) seen[index] = copy.to(device);
    options_.refuse(seen);
    TORCH_CHECK(false, name_, ": refuse must raise an error if the ",
                options_.refuses_late ? "kernel" : "check", " returns False, got none");
  }

  static void move_to_targets(const AllWritten& written) {
    for (const Written& output : written) {
      at::native::resize_output(output.target, output.buffer.sizes());
    }
    for (const Written& output : written) {
      if (!output.buffer.is_same(output.target)) output.target.copy_(output.buffer);
    }
  }

  std::string full_name_, name_;
  std::vector<Parameter> parameters_;
  TileOptions options_;
  // Arguments that are not `out`.
  size_t inputs_;
  // Position of the first required tensor, or the number of parameters.
  size_t first_tensor_;
  // Whether there are parameters that are lists of tensors.
  bool has_lists_;
  bool writes_;
  // Whether a call that has run is all that it takes to make it again.
  bool can_last_;
  // For each result, whether it is a written argument.
  c10::SmallVector<bool, 4> returns_argument_;
  // Layouts of the operator's variant without `out`.
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
