#include "graphs/instruction.h"

#include <ATen/Parallel.h>
#include <ATen/ScalarOps.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/List.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <string>
#include <utility>

#include "launch/batch.h"
#include "launch/lasting.h"

namespace foo::graphs {
namespace {

template <typename... Functions>
struct Overloaded : Functions... {
  using Functions::operator()...;
};
template <typename... Functions>
Overloaded(Functions...) -> Overloaded<Functions...>;

c10::DimVector at_position(const std::vector<Number>& numbers, int64_t position) {
  c10::DimVector values;
  for (const Number& number : numbers) values.push_back(number.at(position));
  return values;
}

bool has_strides(const at::Tensor& tensor, const std::vector<Number>& strides, int64_t position) {
  if (tensor.strides().size() != strides.size()) return false;
  for (size_t i = 0; i < strides.size(); ++i) {
    if (tensor.strides()[i] != strides[i].at(position)) return false;
  }
  return true;
}

// Returns a tensor of the same memory, with sizes that are to be set.
at::Tensor view_of_memory(const at::Tensor& base) {
  return at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), base.dtype());
}

at::Tensor view_of(const View& view, int64_t position, const Registers& registers) {
  const at::Tensor& base = registers[view.base.index];
  at::Tensor result = view_of_memory(base);
  result.unsafeGetTensorImpl()->set_sizes_and_strides(
      at_position(view.sizes, position), at_position(view.strides, position),
      base.storage_offset() + view.offset.at(position));
  return result;
}

Shortcut shortcut_of(const OperatorCall& call) {
  if (call.results.size() != 1 || call.arguments.empty()) return Shortcut::kNone;
  const auto is_register = [](const Argument& it) {
    return std::holds_alternative<Register>(it.value);
  };
  const auto is_register_result = [](const Result& it) {
    return std::holds_alternative<Register>(it);
  };
  if (!is_register(call.arguments[0])) return Shortcut::kNone;
  const c10::OperatorName& name = call.op.operator_name();
  if (name.name == "aten::slice" && name.overload_name == "Tensor" &&
      is_register_result(call.results[0])) {
    return Shortcut::kSlice;
  }
  if (name.name == "aten::embedding" && is_register(call.arguments[1]) &&
      is_register_result(call.results[0])) {
    return Shortcut::kEmbedding;
  }
  const bool fills = name.name == "aten::fill_" && name.overload_name == "Scalar" &&
                     std::holds_alternative<std::monostate>(call.results[0]);
  return fills ? Shortcut::kFill : Shortcut::kNone;
}

// Returns no tensor where the dispatcher is needed.
at::Tensor slice_of(const at::Tensor& base, const c10::IValue& dim, const c10::IValue& start,
                    const c10::IValue& stop, const c10::IValue& step) {
  const bool is_known = dim.isInt() && start.isInt() && stop.isInt() && step.isInt();
  if (!is_known || !is_dense_on_cpu(base)) return {};
  const int64_t first = start.toInt(), along = dim.toInt();
  if (step.toInt() != 1 || along < 0 || along >= base.dim()) return {};
  const int64_t last = std::min(stop.toInt(), base.size(along));
  if (first < 0 || last < first) return {};
  c10::DimVector sizes(base.sizes());
  sizes[along] = last - first;
  at::Tensor result = view_of_memory(base);
  result.unsafeGetTensorImpl()->set_sizes_and_strides(
      sizes, base.strides(), base.storage_offset() + first * base.stride(along));
  return result;
}

// Returns the rows of a few tokens, or no tensor where the dispatcher is needed. ATen takes 6 us to
// copy one row, and 17 while the weights of a model pass through the caches.
at::Tensor embedding_of(const at::Tensor& weight, const at::Tensor& indices) {
  constexpr int64_t kMostTokens = 16;
  const bool is_known = is_dense_on_cpu(weight) && weight.dim() == 2 && weight.is_contiguous() &&
                        is_dense_on_cpu(indices) && indices.scalar_type() == at::kLong &&
                        indices.is_contiguous() && indices.numel() <= kMostTokens;
  if (!is_known) return {};
  const int64_t* const index = indices.const_data_ptr<int64_t>();
  const auto is_row = [&](int64_t it) { return 0 <= it && it < weight.size(0); };
  if (!std::all_of(index, index + indices.numel(), is_row)) return {};
  c10::DimVector sizes(indices.sizes());
  sizes.push_back(weight.size(1));
  at::Tensor result = at::empty(sizes, weight.options());
  const size_t bytes = weight.size(1) * weight.element_size();
  const auto* const from = static_cast<const char*>(weight.const_data_ptr());
  auto* const to = static_cast<char*>(result.mutable_data_ptr());
  for (int64_t i = 0; i < indices.numel(); ++i) {
    std::memcpy(to + i * bytes, from + index[i] * bytes, bytes);
  }
  return result;
}

bool fill(const at::Tensor& target, const c10::IValue& value) {
  const bool is_one =
      is_dense_on_cpu(target) && target.scalar_type() == at::kLong && target.numel() == 1;
  if (!is_one || !value.isInt()) return false;
  *target.mutable_data_ptr<int64_t>() = value.toInt();
  return true;
}

// Runs a call without the dispatcher, or returns false where that is impossible.
bool run_shortcut(const OperatorCall& call, int64_t position, Registers& registers) {
  if (call.shortcut == Shortcut::kNone) return false;
  const at::Tensor& self = registers[std::get<Register>(call.arguments[0].value).index];
  const auto given = [&](size_t place) { return call.arguments[place].at(position, registers); };
  if (call.shortcut == Shortcut::kFill) return fill(self, given(1));
  at::Tensor result = call.shortcut == Shortcut::kEmbedding
                          ? embedding_of(self, given(1).toTensor())
                          : slice_of(self, given(1), given(2), given(3), given(4));
  if (!result.defined()) return false;
  registers[std::get<Register>(call.results[0]).index] = std::move(result);
  return true;
}

bool is_product(const Instruction& instruction) {
  const auto* const call = std::get_if<OperatorCall>(&instruction.action);
  return call != nullptr && is_loop(*call) &&
         call->op.operator_name().name.starts_with("foo::linear");
}

// Returns how many products begin at `first` that do not read each other's results.
int64_t products_from(const std::vector<Instruction>& instructions, size_t first) {
  std::set<int64_t> written;
  size_t next = first;
  for (; next < instructions.size() && is_product(instructions[next]); ++next) {
    const auto& call = std::get<OperatorCall>(instructions[next].action);
    bool reads_result = false;
    each_read(call.arguments,
              [&](int64_t index) { reads_result = reads_result || written.count(index) > 0; });
    if (reads_result) break;
    each_written(call, [&](int64_t index) { written.insert(index); });
  }
  return std::max<int64_t>(1, next - first);
}

// Returns whether all guards hold.
bool store(const std::vector<Result>& results, int64_t position, torch::jit::Stack& stack,
           Registers& registers) {
  bool holds = true;
  for (size_t place = 0; place < results.size(); ++place) {
    c10::IValue& value = stack[place];
    std::visit(Overloaded{
                   [](std::monostate) {},
                   [&](Register target) { registers[target.index] = std::move(value).toTensor(); },
                   [&](const std::vector<int64_t>& targets) {
                     const c10::List<at::Tensor> tensors = value.toTensorList();
                     for (size_t i = 0; i < targets.size(); ++i) registers[targets[i]] = tensors[i];
                   },
                   [&](const Guard& guard) {
                     holds = holds && value == guard.expected.at(position, registers);
                   },
               },
               results[place]);
  }
  return holds;
}

bool execute(const Instruction& instruction, int64_t position, Registers& registers) {
  if (const auto* view = std::get_if<View>(&instruction.action)) {
    if (!has_strides(registers[view->base.index], view->base_strides, position)) return false;
    registers[view->result.index] = view_of(*view, position, registers);
    return true;
  }
  const auto& call = std::get<OperatorCall>(instruction.action);
  if (run_shortcut(call, position, registers)) return true;
  torch::jit::Stack stack;
  stack.reserve(call.arguments.size());
  for (const Argument& each : call.arguments) stack.push_back(each.at(position, registers));
  call.op.callBoxed(stack);
  return store(call.results, position, stack, registers);
}

}  // namespace

c10::IValue Argument::at(int64_t position, const Registers& registers) const {
  return std::visit(Overloaded{
                        [](const c10::IValue& constant) { return constant; },
                        [&](Register source) { return c10::IValue(registers[source.index]); },
                        [&](Number number) { return c10::IValue(number.at(position)); },
                        [&](const NumberAsTensor& it) {
                          at::Tensor tensor = c10::scalar_to_tensor(it.number.at(position));
                          tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
                          return c10::IValue(std::move(tensor));
                        },
                        [&](const std::vector<Argument>& elements) {
                          c10::impl::GenericList list(element_type);
                          list.reserve(elements.size());
                          for (const Argument& each : elements)
                            list.push_back(each.at(position, registers));
                          return c10::IValue(std::move(list));
                        },
                    },
                    value);
}

bool is_loop(const OperatorCall& call) {
  static const std::set<std::string> names = {
      "foo::linear",          "foo::linear_activation", "foo::linear_silu_mul",
      "foo::linear_int8",     "foo::linear_int4",       "foo::linear_fp8",
      "foo::linear_mxfp4",    "foo::linear_table4",     "foo::rms_norm",
      "foo::add_rms_norm",    "foo::layer_norm",        "foo::add_layer_norm",
      "foo::rotary_embedding"};
  return names.count(call.op.operator_name().name) > 0 && !call.op.schema().is_mutable();
}

std::vector<bool> sharing_memory(const std::vector<Instruction>& instructions,
                                 const std::vector<int64_t>& these, size_t count) {
  std::vector<bool> share(count);
  for (const int64_t index : these) share[index] = true;
  for (auto each = instructions.rbegin(); each != instructions.rend(); ++each) {
    if (const auto* view = std::get_if<View>(&each->action)) {
      if (share[view->result.index]) share[view->base.index] = true;
      continue;
    }
    const auto& call = std::get<OperatorCall>(each->action);
    bool has_one = false;
    each_written(call, [&](int64_t index) { has_one = has_one || share[index]; });
    // Other operators than loops may return a tensor that shares memory with an argument.
    if (!has_one || is_loop(call)) continue;
    each_read(call.arguments, [&](int64_t index) { share[index] = true; });
  }
  return share;
}

void complete(std::vector<Instruction>& instructions) {
  for (Instruction& each : instructions) {
    if (auto* call = std::get_if<OperatorCall>(&each.action)) call->shortcut = shortcut_of(*call);
  }
  for (size_t i = 0; i < instructions.size(); ++i) {
    instructions[i].products = products_from(instructions, i);
  }
}

size_t end_of_group(const std::vector<Instruction>& instructions, size_t begin) {
  return begin + (at::get_num_threads() > 1 ? instructions[begin].products : 1);
}

bool execute(const std::vector<Instruction>& instructions, size_t begin, size_t end,
             int64_t position, Registers& registers) {
  std::optional<LoopBatch> batch;
  if (end - begin > 1) batch.emplace();
  for (size_t next = begin; next < end; ++next) {
    if (!execute(instructions[next], position, registers)) return false;
  }
  if (batch.has_value()) batch->run();
  return true;
}

bool execute_from(const std::vector<Instruction>& instructions, size_t begin, int64_t position,
                  Registers& registers) {
  for (size_t end = begin; begin < instructions.size(); begin = end) {
    end = end_of_group(instructions, begin);
    if (!execute(instructions, begin, end, position, registers)) return false;
    for (size_t next = begin; next < end; ++next) {
      for (const int64_t index : instructions[next].last_uses) registers[index].reset();
    }
  }
  return true;
}

}  // namespace foo::graphs
