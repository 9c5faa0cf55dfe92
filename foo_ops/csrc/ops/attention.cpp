#include "ops/attention.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <cmath>

#include "kernel_table.h"

namespace foo {

namespace {

// As in foo_ops/kernels/attention.py.
constexpr int64_t kQueryBlock = 64;
constexpr int64_t kKeyBlock = 64;
constexpr int64_t kWidestVector = 16;

// Pieces of work that a backward pass over few heads is cut into: a number that does not depend on
// the threads, so that neither do the sums.
constexpr int64_t kBackwardPieces = 8;

enum BiasKind : int64_t { kNone, kBool, kOfQueryDtype, kFloat32 };

// A tensor of four dimensions: data and strides in elements.
struct Operand {
  void* data = nullptr;
  int64_t strides[4] = {0, 0, 0, 0};

  Operand() = default;
  explicit Operand(const at::Tensor& tensor) : data(tensor.data_ptr()) {
    for (int64_t i = 0; i < tensor.dim(); ++i) {
      strides[i] = tensor.stride(i);
    }
  }
};

// What the kernels get to know: _parameters in foo_ops/kernels/attention.py, field by field.
struct Parameters {
  double scale;
  int64_t query_heads, key_heads, query_length, key_length, head_dim, value_dim;
  int64_t is_causal, bias_kind, bias_batch, bias_heads, bias_rows, bias_columns;
  int64_t batch, chunks;
  Operand query, key, value, attn_bias, output, logsumexp;
  Operand grad_output, grad_logsumexp, grad_query, grad_key, grad_value, grad_attn_bias;
};

using AttentionFunction = void(const Parameters*, void* scratch, int64_t, int64_t, int64_t);
using SumFunction = void(void* gradient, const void* sums, int64_t rows, int64_t columns,
                         int64_t width, int64_t chunks);

// Kernels live as long as the process: they are never destroyed.
Kernel& forward_kernel() {
  static auto* kernel = new Kernel("attention_forward");
  return *kernel;
}

Kernel& backward_kernel() {
  static auto* kernel = new Kernel("attention_backward");
  return *kernel;
}

Kernel& bias_backward_kernel() {
  static auto* kernel = new Kernel("attention_bias_backward");
  return *kernel;
}

Kernel& sum_chunks_kernel() {
  static auto* kernel = new Kernel("attention_sum_chunks");
  return *kernel;
}

int64_t ceil_divide(int64_t count, int64_t size) {
  return (count + size - 1) / size;
}

int64_t round_up_to_vector(int64_t count) {
  return ceil_divide(count, kWidestVector) * kWidestVector;
}

at::ScalarType compute_type(const at::Tensor& query) {
  return query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// The bias with four dimensions, as it is stored.
at::Tensor with_four_dimensions(const at::Tensor& bias) {
  at::Tensor result = bias;
  while (result.dim() < 4) {
    result = result.unsqueeze(0);
  }
  return result;
}

void set_bias(Parameters& parameters, const at::Tensor& bias, at::ScalarType query_type) {
  const at::Tensor stored = with_four_dimensions(bias);
  parameters.bias_kind = bias.scalar_type() == at::kBool    ? kBool
                         : bias.scalar_type() == query_type ? kOfQueryDtype
                                                            : kFloat32;
  parameters.bias_batch = stored.size(0);
  parameters.bias_heads = stored.size(1);
  parameters.bias_rows = stored.size(2);
  parameters.bias_columns = stored.size(3);
  parameters.attn_bias = Operand(stored.expand(
      {parameters.batch, parameters.query_heads, parameters.query_length, parameters.key_length}));
}

Parameters make_parameters(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                           const std::optional<at::Tensor>& attn_bias, bool is_causal,
                           std::optional<double> scale) {
  Parameters parameters{};
  parameters.scale = scale.value_or(1.0 / std::sqrt(static_cast<double>(query.size(3))));
  parameters.batch = query.size(0);
  parameters.query_heads = query.size(1);
  parameters.key_heads = key.size(1);
  parameters.query_length = query.size(2);
  parameters.key_length = key.size(2);
  parameters.head_dim = query.size(3);
  parameters.value_dim = value.size(3);
  parameters.is_causal = is_causal;
  parameters.query = Operand(query);
  parameters.key = Operand(key);
  parameters.value = Operand(value);
  if (attn_bias.has_value()) {
    set_bias(parameters, *attn_bias, query.scalar_type());
  }
  return parameters;
}

// Calls work(scratch, index) for each index, in parallel. Each thread has its own scratch memory,
// enough for the tiles and packed blocks of any of the kernels.
template <class Work>
void run(const Parameters& parameters, at::ScalarType scratch_type, int64_t count, Work work) {
  const int64_t dims = parameters.head_dim + parameters.value_dim;
  const int64_t tiles = 4 * kKeyBlock * kQueryBlock + kKeyBlock * dims;
  const int64_t packed = kQueryBlock * (3 * dims + 2 * kWidestVector);
  const int64_t statistics = 3 * kQueryBlock;
  const int64_t size = round_up_to_vector(tiles + packed + statistics);
  const at::Tensor scratch = at::empty({at::get_num_threads(), size},
                                       at::TensorOptions().dtype(scratch_type).device(at::kCPU));
  char* const memory = static_cast<char*>(scratch.data_ptr());
  const int64_t bytes = size * scratch.element_size();
  at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) {
      work(memory + at::get_thread_num() * bytes, index);
    }
  });
}

// First and last blocks in turn: with a causal mask a thread that takes a run of them has as much
// to do as any other.
int64_t balanced(int64_t index, int64_t blocks) {
  return index % 2 == 0 ? index / 2 : blocks - 1 - index / 2;
}

std::tuple<at::Tensor, at::Tensor> attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const std::optional<at::Tensor>& attn_bias, const std::optional<at::Tensor>& alibi_slopes,
    const std::optional<at::Tensor>& sinks, bool is_causal, std::optional<double> scale,
    double dropout_p, int64_t window_left, int64_t window_right, double softcap) {
  check_attention(query, key, value, attn_bias, alibi_slopes, sinks,
                  {dropout_p, window_left, window_right, softcap});
  const at::Tensor output =
      at::empty({query.size(0), query.size(1), query.size(2), value.size(3)}, query.options());
  const at::Tensor logsumexp = at::empty({query.size(0), query.size(1), query.size(2)},
                                         query.options().dtype(compute_type(query)));
  if (logsumexp.numel() == 0) {
    return {output, logsumexp};
  }
  auto parameters = make_parameters(query, key, value, attn_bias, is_causal, scale);
  parameters.output = Operand(output);
  parameters.logsumexp = Operand(logsumexp);

  auto* kernel = forward_kernel().get<AttentionFunction>(query.scalar_type());
  const int64_t blocks = ceil_divide(parameters.query_length, kQueryBlock);
  run(parameters, compute_type(query), parameters.batch * parameters.query_heads * blocks,
      [&](void* scratch, int64_t index) {
        const int64_t head = index / blocks;
        const int64_t query_start = balanced(index % blocks, blocks) * kQueryBlock;
        kernel(&parameters, scratch, head / parameters.query_heads, head % parameters.query_heads,
               query_start);
      });
  return {output, logsumexp};
}

void set_gradients(Parameters& parameters, const at::Tensor& grad_output,
                   const at::Tensor& grad_logsumexp, const at::Tensor& output,
                   const at::Tensor& logsumexp) {
  parameters.output = Operand(output);
  parameters.logsumexp = Operand(logsumexp);
  parameters.grad_output = Operand(grad_output);
  parameters.grad_logsumexp = Operand(grad_logsumexp);
}

// Sums of grad_key or grad_value for every chunk, as rows of whole vectors.
at::Tensor make_sums(const Parameters& parameters, int64_t dim, at::ScalarType dtype) {
  return at::zeros({parameters.batch * parameters.key_heads, parameters.chunks,
                    parameters.key_length, round_up_to_vector(dim)},
                   at::TensorOptions().dtype(dtype).device(at::kCPU));
}

void sum_chunks(const at::Tensor& gradient, const at::Tensor& sums) {
  auto* kernel = sum_chunks_kernel().get<SumFunction>(gradient.scalar_type());
  const int64_t rows = gradient.size(2);
  const int64_t columns = gradient.size(3);
  char* const target = static_cast<char*>(gradient.data_ptr());
  const char* const source = static_cast<const char*>(sums.data_ptr());
  at::parallel_for(0, sums.size(0), 1, [&](int64_t begin, int64_t end) {
    for (int64_t head = begin; head < end; ++head) {
      kernel(target + head * rows * columns * gradient.element_size(),
             source + head * sums.stride(0) * sums.element_size(), rows, columns, sums.size(3),
             sums.size(1));
    }
  });
}

at::Tensor empty_contiguous(const at::Tensor& tensor) {
  return at::empty_like(tensor, tensor.options(), at::MemoryFormat::Contiguous);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> attention_backward(
    const at::Tensor& grad_output, const at::Tensor& grad_logsumexp, const at::Tensor& query,
    const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& attn_bias,
    const at::Tensor& output, const at::Tensor& logsumexp, bool is_causal,
    std::optional<double> scale) {
  check_attention_gradients(grad_output, grad_logsumexp, query, key, value, attn_bias, output,
                            logsumexp);
  const at::Tensor grad_query = empty_contiguous(query);
  const at::Tensor grad_key = empty_contiguous(key);
  const at::Tensor grad_value = empty_contiguous(value);

  auto parameters = make_parameters(query, key, value, attn_bias, is_causal, scale);
  set_gradients(parameters, grad_output, grad_logsumexp, output, logsumexp);
  const int64_t heads = parameters.batch * parameters.key_heads;
  if (heads == 0) {
    return {grad_query, grad_key, grad_value};
  }
  const int64_t blocks = ceil_divide(parameters.query_length, kQueryBlock) *
                         (parameters.query_heads / parameters.key_heads);
  parameters.chunks = std::max<int64_t>(1, std::min(blocks, ceil_divide(kBackwardPieces, heads)));
  const at::Tensor key_sums = make_sums(parameters, parameters.head_dim, compute_type(query));
  const at::Tensor value_sums = make_sums(parameters, parameters.value_dim, compute_type(query));
  parameters.grad_query = Operand(grad_query);
  parameters.grad_key = Operand(key_sums);
  parameters.grad_value = Operand(value_sums);

  auto* kernel = backward_kernel().get<AttentionFunction>(query.scalar_type());
  run(parameters, compute_type(query), heads * parameters.chunks,
      [&](void* scratch, int64_t index) {
        const int64_t head = index / parameters.chunks;
        kernel(&parameters, scratch, head / parameters.key_heads, head % parameters.key_heads,
               index % parameters.chunks);
      });
  sum_chunks(grad_key, key_sums);
  sum_chunks(grad_value, value_sums);
  return {grad_query, grad_key, grad_value};
}

at::Tensor attention_bias_backward(const at::Tensor& grad_output, const at::Tensor& grad_logsumexp,
                                   const at::Tensor& query, const at::Tensor& key,
                                   const at::Tensor& value, const at::Tensor& attn_bias,
                                   const at::Tensor& output, const at::Tensor& logsumexp,
                                   bool is_causal, std::optional<double> scale) {
  check_attention_gradients(grad_output, grad_logsumexp, query, key, value, attn_bias, output,
                            logsumexp);
  TORCH_CHECK_TYPE(attn_bias.is_floating_point(),
                   "attention_bias_backward: attn_bias must be floating-point, got ",
                   dtype_name(attn_bias.scalar_type()));
  const at::Tensor grad_bias = empty_contiguous(attn_bias);
  if (grad_bias.numel() == 0) {
    return grad_bias;
  }
  auto parameters = make_parameters(query, key, value, attn_bias, is_causal, scale);
  set_gradients(parameters, grad_output, grad_logsumexp, output, logsumexp);
  parameters.grad_attn_bias = Operand(with_four_dimensions(grad_bias));

  auto* kernel = bias_backward_kernel().get<AttentionFunction>(query.scalar_type());
  const int64_t row_blocks = ceil_divide(parameters.bias_rows, kQueryBlock);
  const int64_t column_tiles = ceil_divide(parameters.bias_columns, kKeyBlock);
  const int64_t tiles = row_blocks * column_tiles;
  run(parameters, compute_type(query), parameters.bias_batch * parameters.bias_heads * tiles,
      [&](void* scratch, int64_t index) {
        kernel(&parameters, scratch, index / tiles, index % tiles / column_tiles,
               index % column_tiles);
      });
  return grad_bias;
}

void register_attention(torch::Library& library) {
  library.impl("attention", &attention);
  library.impl("attention_backward", &attention_backward);
  library.impl("attention_bias_backward", &attention_bias_backward);
}

}  // namespace

TORCH_LIBRARY_IMPL(foo, CPU, library) {
  register_attention(library);
}
TORCH_LIBRARY_IMPL(foo, PrivateUse1, library) {
  register_attention(library);
}

}  // namespace foo
