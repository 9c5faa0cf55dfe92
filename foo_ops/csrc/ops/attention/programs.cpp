#include "ops/attention/programs.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>

#include "launch/kernel_table.h"
#include "launch/read_once.h"
#include "ops/attention/bias_gradient.h"
#include "ops/attention/plan.h"

namespace foo {

namespace {

// What a kernel is compiled for: the compute type, dtype and dimensions of each captured tensor.
Signature signature_of(at::ScalarType type, at::TensorList captured) {
  Signature signature{static_cast<int16_t>(type)};
  for (const at::Tensor& tensor : captured) {
    signature.push_back(static_cast<int16_t>(tensor.scalar_type()));
    if (tensor.dim() > 0) signature.push_back(static_cast<int16_t>(kRankZero - tensor.dim()));
  }
  return signature;
}

// The address of the kernel that these programs become, or 0 where there is none.
int64_t function_of(at::ScalarType type, const Programs& given, std::string_view score_mod,
                    std::string_view mask_mod, std::string_view backward) {
  if (score_mod.empty() && mask_mod.empty() && backward.empty()) return 0;
  // Kernels live as long as the process: they are never destroyed.
  static auto* kernels = new std::map<std::string, Kernel, std::less<>>();
  static auto* mutex = new std::mutex();
  std::string name = "attention_program " + std::to_string(given.numbers.size()) + ' ' +
                     std::to_string(given.integers.size());
  for (const std::string_view program : {score_mod, mask_mod, backward}) {
    name.append("\n\n").append(program);
  }
  Kernel* kernel = nullptr;
  {
    const std::lock_guard<std::mutex> lock(*mutex);
    kernel = &kernels->try_emplace(name, name).first->second;
  }
  return reinterpret_cast<int64_t>(kernel->get<void()>(signature_of(type, given.captured)));
}

}  // namespace

BlockStates::BlockStates(Parameters& parameters, const BlockMask& mask, bool has_mask_mod)
    : key_block_(std::max<int64_t>(1, parameters.key_length)) {
  int64_t query_block = std::max<int64_t>(1, parameters.query_length);
  if (mask.kv_num_blocks.has_value()) {
    query_block = mask.query_block;
    key_block_ = mask.key_block;
    const at::Tensor& counts = *mask.kv_num_blocks;
    const int64_t rows = counts.size(2);
    rows_ = counts.size(0) * counts.size(1) * rows;
    columns_ = ceil_divide(parameters.key_length, key_block_);
    parameters.mask_batch_stride = counts.size(0) == 1 ? 0 : counts.size(1) * rows;
    parameters.mask_head_stride = counts.size(1) == 1 ? 0 : rows;
    blocks_.assign(rows_ * columns_, kHidden);
    read(counts, *mask.kv_indices, "kv_indices", has_mask_mod ? kMasked : kSeen);
    if (mask.full_kv_num_blocks.has_value()) {
      read(*mask.full_kv_num_blocks, *mask.full_kv_indices, "full_kv_indices", kSeen);
    }
  } else {
    blocks_.assign(1, has_mask_mod ? kMasked : kSeen);
  }
  set_windows(parameters.key_length);
  parameters.mask_query_block = query_block;
  parameters.mask_key_block = key_block_;
  parameters.mask_columns = columns_;
  parameters.windows = ceil_divide(parameters.key_length, kKeyBlock);
  parameters.block_states = blocks_.data();
  parameters.window_states = windows_.data();
}

void BlockStates::read(const at::Tensor& counts, const at::Tensor& indices, const char* name,
                       BlockState state) {
  const at::Tensor numbers = read_once(counts), places = read_once(indices);
  const auto* const number = numbers.const_data_ptr<int32_t>();
  const auto* const place = places.const_data_ptr<int32_t>();
  const int64_t most = indices.size(3);
  for (int64_t row = 0; row < rows_; ++row) {
    TORCH_CHECK_VALUE(number[row] >= 0 && number[row] <= most, "flex_attention: ", name,
                      " must have at least as many columns as a row has blocks, ", number[row],
                      ", got ", most);
    for (int64_t i = 0; i < number[row]; ++i) {
      const int64_t block = place[row * most + i];
      TORCH_CHECK_VALUE(block >= 0, "flex_attention: ", name,
                        " must have block numbers of at least 0, got ", block);
      // A mask may be of more keys than there are.
      if (block < columns_) blocks_[row * columns_ + block] = state;
    }
  }
}

void BlockStates::set_windows(int64_t key_length) {
  const int64_t count = ceil_divide(key_length, kKeyBlock);
  windows_.assign(rows_ * count, kHidden);
  for (int64_t row = 0; row < rows_; ++row) {
    for (int64_t window = 0; window < count; ++window) {
      const int64_t stop = std::min(key_length, (window + 1) * kKeyBlock);
      const auto* const states = blocks_.data() + row * columns_;
      const auto* const first = states + window * kKeyBlock / key_block_;
      const auto* const last = states + (stop - 1) / key_block_;
      const bool are_alike = std::all_of(first, last + 1, [&](auto it) { return it == *first; });
      windows_[row * count + window] = are_alike ? *first : uint8_t{kMixed};
    }
  }
}

ProgramCall::ProgramCall(Parameters& parameters, const Programs& programs, const BlockMask& mask,
                         at::ScalarType compute_type)
    : parameters_(parameters),
      programs_(programs),
      type_(compute_type),
      states_(parameters, mask, !programs.mask_mod.empty()) {
  for (const at::Tensor& tensor : programs.captured) {
    CapturedTensor& captured = captured_.emplace_back();
    captured.data = tensor.const_data_ptr();
    std::copy_n(tensor.sizes().begin(), tensor.dim(), captured.sizes);
    std::copy_n(tensor.strides().begin(), tensor.dim(), captured.strides);
  }
  arguments_.numbers = programs.numbers.data();
  arguments_.integers = programs.integers.data();
  arguments_.captured = captured_.data();
  arguments_.outside = &outside_;
  // A factor that is not positive would turn the largest product into the smallest score.
  const bool is_plain = programs.score_mod.empty() && parameters.scale > 0.0 &&
                        std::isfinite(parameters.scale);
  parameters.factor = is_plain ? kLog2E * parameters.scale : kLog2E;
  arguments_.scale = is_plain ? 1.0 : parameters.scale;
  std::string score_mod(programs.score_mod);
  if (score_mod.empty() && !is_plain) score_mod = dtype_name(type_) + " input score\noutput 0";
  parameters.programs = reinterpret_cast<const int64_t*>(&arguments_);
  parameters.score_function = function_of(type_, programs, score_mod, {}, {});
  parameters.masked_score_function = function_of(type_, programs, score_mod, programs.mask_mod, {});
  parameters.gradient_function = function_of(type_, programs, {}, {}, programs.backward);
}

void ProgramCall::allocate_gradients(const std::vector<bool>& requires_grad, int64_t chunks) {
  for (size_t i = 0; i < captured_.size(); ++i) {
    at::Tensor& sums = sums_.emplace_back();
    if (!requires_grad[i]) continue;
    const int64_t count = programs_.captured[i].numel();
    const auto batch = std::max<int64_t>(1, parameters_.batch);
    const auto key_heads = std::max<int64_t>(1, parameters_.key_heads);
    sums = at::zeros({batch, key_heads, chunks, count},
                     at::TensorOptions().dtype(type_).device(at::kCPU));
    CapturedTensor& captured = captured_[i];
    captured.gradient = sums.data_ptr();
    captured.of_batch = sums.stride(0);
    captured.of_head = sums.stride(1);
    captured.of_chunk = sums.stride(2);
    int64_t stride = 1;
    for (int64_t axis = programs_.captured[i].dim() - 1; axis >= 0; --axis) {
      captured.gradient_strides[axis] = stride;
      stride *= captured.sizes[axis];
    }
  }
}

std::vector<at::Tensor> ProgramCall::gradients() const {
  std::vector<at::Tensor> gradients;
  for (size_t i = 0; i < captured_.size(); ++i) {
    const at::Tensor& captured = programs_.captured[i];
    if (!sums_[i].defined()) {
      gradients.push_back(at::empty({0}, captured.options()));
      continue;
    }
    const int64_t count = captured.numel();
    const at::Tensor total = sum_in_order(sums_[i].view({-1, count}), 0);
    gradients.push_back(total.view(captured.sizes()).to(captured.options()));
  }
  return gradients;
}

void ProgramCall::check_indices(const char* name) const {
  if (outside_ == 0) return;
  const int64_t number = outside_ - 1;
  TORCH_CHECK_INDEX(false, name, ": score_mod and mask_mod must index captured tensor ", number,
                    " within its shape ", programs_.captured[number].sizes());
}

}  // namespace foo
