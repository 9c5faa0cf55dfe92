#include "ops/tile_call.h"

#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <mutex>

#include "ops/bounds.h"

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

bool TileCall::run(const std::string& operator_name, Kernel& kernel, const TileOptions& options,
                   c10::Device device) {
  if (checks_bounds()) signature_.push_back(kChecked);
  auto* function = kernel.get<TileFunction>(signature_);
  Outside outside;
  outside.is_found = 0;
  values_.check_bounds(outside);
  Views views;
  const int64_t largest = make_views(views, outside);
  // Of the call, then of its threads, until nothing refers to a view any more.
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
  const ScratchShapes of_call = scratch_shapes(operator_name, options, counts.data() + 1, true);
  const ScratchShapes of_thread = scratch_shapes(operator_name, options, counts.data() + 1, false);
  scratch.emplace_back(of_call, 0, outside).give(numbers_.data());
  // A call that is refused leaves the generator as it was.
  for (const auto& [index, generator] : generators_) {
    numbers_[index] = draw_seed(generator, device);
  }
  std::mutex mutex;
  const int64_t grain = std::max<int64_t>(1, tiles * at::internal::GRAIN_SIZE / (largest + 1));
  at::parallel_for(0, tiles, grain_size(grain), [&](int64_t begin, int64_t end) {
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

int64_t TileCall::make_views(Views& views, Outside& outside) {
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

}  // namespace foo
