#include "ops/attention/programs.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>

#include "launch/fork_mutex.h"
#include "launch/jobs.h"
#include "launch/kernel_table.h"
#include "launch/memory.h"
#include "ops/attention/passes.h"
#include "ops/attention/plan.h"

namespace foo {

namespace {

// Returns the signature of a kernel: the compute type, and dtype and dimensions of each captured
// tensor.
Signature signature_of(at::ScalarType type, at::TensorList captured) {
  Signature signature{static_cast<int16_t>(type)};
  for (const at::Tensor& tensor : captured) {
    signature.push_back(static_cast<int16_t>(tensor.scalar_type()));
    if (tensor.dim() > 0) signature.push_back(static_cast<int16_t>(kRankZero - tensor.dim()));
  }
  return signature;
}

// Returns the address of the kernel compiled from these programs, or 0 if there are none.
int64_t function_of(at::ScalarType type, const Programs& given, std::string_view score_mod,
                    std::string_view mask_mod, std::string_view backward,
                    const char* family = "attention_program") {
  if (score_mod.empty() && mask_mod.empty() && backward.empty()) return 0;
  // Kernels live as long as the process: they are never destroyed.
  static auto* kernels = new std::map<std::string, Kernel, std::less<>>();
  static auto* mutex = new ForkMutex();
  std::string name = std::string(family) + ' ' + std::to_string(given.numbers.size()) + ' ' +
                     std::to_string(given.integers.size());
  for (const std::string_view program : {score_mod, mask_mod, backward}) {
    name.append("\n\n").append(program);
  }
  Kernel* kernel = nullptr;
  {
    const std::lock_guard<ForkMutex> lock(*mutex);
    kernel = &kernels->try_emplace(name, name).first->second;
  }
  return reinterpret_cast<int64_t>(kernel->get<void()>(signature_of(type, given.captured)));
}

// Up to this many elements of captured tensors' gradients, each row of the batch and each head has
// its own sums: 64 MiB of float32.
constexpr int64_t kMostSums = int64_t{1} << 24;

std::vector<std::string_view> split(std::string_view text, char end) {
  std::vector<std::string_view> parts;
  while (!text.empty()) {
    const size_t length = std::min(text.find(end), text.size());
    parts.push_back(text.substr(0, length));
    text.remove_prefix(std::min(length + 1, text.size()));
  }
  return parts;
}

// Returns the captured tensor whose gradient a line of a program adds to, or -1.
int64_t gradient_of(std::string_view line) {
  constexpr std::string_view kBeginning = "gradient ";
  if (line.substr(0, kBeginning.size()) != kBeginning) return -1;
  return std::stol(std::string(line.substr(kBeginning.size())));
}

// Removes gradients that are not required from a program. Returns an empty program if only a
// gradient that passes through unchanged remains.
std::string only_required(std::string_view backward, const std::vector<bool>& requires_grad) {
  std::string text;
  const auto lines = split(backward, '\n');
  bool changes = false;
  for (const std::string_view line : lines) {
    constexpr std::string_view kOutput = "output ";
    const int64_t captured = gradient_of(line);
    if (captured >= 0 && !requires_grad.at(captured)) continue;
    if (line.substr(0, kOutput.size()) == kOutput) {
      const auto output = lines.at(std::stoul(std::string(line.substr(kOutput.size()))));
      changes = changes || output.find(" input grad") == std::string_view::npos;
    }
    changes = changes || captured >= 0;
    text.append(text.empty() ? "" : "\n").append(line);
  }
  return changes ? text : "";
}

// Tells whether one of the indices at which a program adds to the gradient of a captured tensor is
// the row of the batch, or the head. If so, no two of them add to the same elements.
SharedSums indexed_by(std::string_view backward, size_t number) {
  const auto lines = split(backward, '\n');
  SharedSums found{.batch = true, .heads = true};
  for (const std::string_view line : lines) {
    if (gradient_of(line) != static_cast<int64_t>(number)) continue;
    // The indices follow the captured tensor and the value.
    const auto words = split(line, ' ');
    const auto has = [&](std::string_view input) {
      return std::any_of(words.begin() + 3, words.end(), [&](std::string_view word) {
        return lines.at(std::stoul(std::string(word))) == input;
      });
    };
    found.batch = found.batch && has("int32 input batch");
    found.heads = found.heads && has("int32 input head");
  }
  return found;
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
  set(parameters, query_block);
}

void BlockStates::set(Parameters& parameters, int64_t query_block) {
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
                      " must have a column for each of the ", number[row], " blocks of a row, got ",
                      most);
    for (int64_t i = 0; i < number[row]; ++i) {
      const int64_t block = place[row * most + i];
      TORCH_CHECK_VALUE(block >= 0, "flex_attention: ", name,
                        " must have block numbers of at least 0, got ", block);
      // A mask may cover more keys than there are.
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

void BlockStates::ask(Parameters& parameters, const std::vector<Sequence>& sequences,
                      ProgramFunction* counts, const ProgramArguments& arguments, bool of_sequence,
                      bool of_head) {
  const int64_t rows = ceil_divide(parameters.query_length, kKeyBlock);
  const int64_t count = of_sequence ? static_cast<int64_t>(sequences.size()) : 1;
  const int64_t heads = of_head ? parameters.query_heads : 1;
  key_block_ = kKeyBlock;
  columns_ = ceil_divide(parameters.key_length, kKeyBlock);
  rows_ = count * heads * rows;
  blocks_.assign(rows_ * columns_, kHidden);
  parameters.mask_batch_stride = of_sequence ? heads * rows : 0;
  parameters.mask_head_stride = of_head ? rows : 0;
  const int64_t blocks = sequences.empty() ? 0 : rows_ * columns_;
  share_steps(blocks, kKeyBlock * kKeyBlock, [&](int64_t begin, int64_t end) {
    for (int64_t place = begin; place < end; ++place) {
      const int64_t row = place / columns_, batch = row / rows / heads;
      const Sequence& sequence = sequences[batch];
      const int64_t query = row % rows * kKeyBlock, key = place % columns_ * kKeyBlock;
      const int64_t queries = std::min(kKeyBlock, sequence.query_length - query);
      const int64_t keys = std::min(kKeyBlock, sequence.key_length - key);
      if (queries <= 0 || keys <= 0) continue;
      int64_t seen = 0;
      counts(&arguments, nullptr, &seen, queries, keys, query, key, batch, row / rows % heads, 0,
             0);
      blocks_[place] = seen == 0 ? kHidden : seen == queries * keys ? kSeen : kMasked;
    }
  });
  set(parameters, kKeyBlock);
}

ProgramCall::ProgramCall(Parameters& parameters, const std::vector<Sequence>& sequences,
                         const Programs& programs, const BlockMask& mask,
                         at::ScalarType compute_type, std::vector<bool> requires_grad)
    : parameters_(parameters),
      programs_(programs),
      type_(compute_type),
      requires_grad_(std::move(requires_grad)),
      backward_(only_required(programs.backward, requires_grad_)),
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
  // A factor that is not positive would make the largest product the smallest score.
  const bool folds_scale =
      programs.score_mod.empty() && parameters.scale > 0.0 && std::isfinite(parameters.scale);
  parameters.factor = folds_scale ? kLog2E * parameters.scale : kLog2E;
  arguments_.scale = folds_scale ? 1.0 : parameters.scale;
  std::string score_mod(programs.score_mod);
  if (score_mod.empty() && !folds_scale) score_mod = dtype_name(type_) + " input score\noutput 0";
  parameters.programs = reinterpret_cast<const int64_t*>(&arguments_);
  parameters.score_function = function_of(type_, programs, score_mod, {}, {});
  parameters.masked_score_function = function_of(type_, programs, score_mod, programs.mask_mod, {});
  parameters.gradient_function = function_of(type_, programs, {}, {}, backward_);
  if (!programs.mask_mod.empty() && !mask.kv_num_blocks.has_value()) {
    const auto depends_on = [&](const char* input) {
      return programs.mask_mod.find(input) != std::string_view::npos;
    };
    const int64_t counts =
        function_of(type_, programs, {}, programs.mask_mod, {}, "attention_mask");
    const bool are_alike =
        std::all_of(sequences.begin(), sequences.end(), [&](const Sequence& sequence) {
          return sequence.query_length == parameters.query_length &&
                 sequence.key_length == parameters.key_length;
        });
    states_.ask(parameters, sequences, reinterpret_cast<ProgramFunction*>(counts), arguments_,
                !are_alike || depends_on("input batch"), depends_on("input head"));
  }
}

SharedSums ProgramCall::sharing() const {
  SharedSums apart{.batch = true, .heads = true};
  int64_t elements = 0;
  for (size_t i = 0; i < captured_.size(); ++i) {
    if (!requires_grad_[i]) continue;
    const SharedSums own = indexed_by(backward_, i);
    elements += programs_.captured[i].numel() * (own.batch ? 1 : parameters_.batch) *
                (own.heads ? 1 : parameters_.key_heads);
    apart.batch = apart.batch && own.batch;
    apart.heads = apart.heads && own.heads;
  }
  if (elements <= kMostSums) return {};
  return {.batch = !apart.batch, .heads = !apart.heads};
}

bool ProgramCall::has_sums() const {
  return std::find(requires_grad_.begin(), requires_grad_.end(), true) != requires_grad_.end();
}

void ProgramCall::allocate_gradients(int64_t chunks) {
  const SharedSums shared = sharing();
  for (size_t i = 0; i < captured_.size(); ++i) {
    at::Tensor& sums = sums_.emplace_back();
    if (!requires_grad_[i]) continue;
    const SharedSums own = indexed_by(backward_, i);
    const int64_t batch = own.batch || shared.batch ? 1 : std::max<int64_t>(1, parameters_.batch);
    const int64_t heads =
        own.heads || shared.heads ? 1 : std::max<int64_t>(1, parameters_.key_heads);
    sums = at::zeros({batch, heads, chunks, programs_.captured[i].numel()},
                     at::TensorOptions().dtype(type_).device(at::kCPU));
    CapturedTensor& captured = captured_[i];
    captured.gradient = sums.data_ptr();
    captured.of_batch = batch == 1 ? 0 : sums.stride(0);
    captured.of_head = heads == 1 ? 0 : sums.stride(1);
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
