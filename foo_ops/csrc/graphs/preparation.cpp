#include "graphs/preparation.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "launch/kernel_table.h"
#include "launch/lasting.h"

namespace foo::graphs {
namespace {

// Most bytes of a program's tensors that stay. A token of 32 layers of 4096 has 3 MB; with more
// rows, launchers take less of the time.
constexpr int64_t kMostBytes = int64_t{4} << 20;

bool is_fixed(const Number& number) {
  return number.step == 0;
}

bool is_fixed(const View& view) {
  const auto are_fixed = [](const std::vector<Number>& numbers) {
    return std::all_of(numbers.begin(), numbers.end(),
                       [](const Number& it) { return is_fixed(it); });
  };
  return are_fixed(view.base_strides) && are_fixed(view.sizes) && are_fixed(view.strides) &&
         is_fixed(view.offset);
}

// Whether all that changes from run to run are tensors.
bool is_fixed(const OperatorCall& call) {
  return std::all_of(call.arguments.begin(), call.arguments.end(), [](const Argument& it) {
    return std::holds_alternative<c10::IValue>(it.value) ||
           std::holds_alternative<Register>(it.value);
  });
}

const c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.defined() && tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl()
                                                  : nullptr;
}

bool has_layout_of(const at::Tensor& tensor, const at::Tensor& other) {
  return is_dense_on_cpu(tensor) && tensor.scalar_type() == other.scalar_type() &&
         tensor.sizes() == other.sizes() && tensor.strides() == other.strides();
}

void copy_values(const at::Tensor& from, const at::Tensor& to) {
  std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), to.nbytes());
}

}  // namespace

Preparation::Preparation(const std::vector<Instruction>& instructions,
                         const std::vector<int64_t>& outputs, Registers registers)
    : instructions_(instructions),
      threads_(at::get_num_threads()),
      registers_(std::move(registers)),
      is_read_(registers_.size()),
      escapes_(registers_.size()) {
  for (const at::Tensor& each : registers_) is_constant_.push_back(each.defined());
  stays_ = is_constant_;
  for (const int64_t index : outputs) escapes_[index] = true;
  for (auto each = instructions.rbegin(); each != instructions.rend(); ++each) {
    if (const auto* view = std::get_if<View>(&each->action)) {
      if (escapes_[view->result.index]) escapes_[view->base.index] = true;
      if (is_read_[view->result.index] && is_fixed(*view)) is_read_[view->base.index] = true;
      continue;
    }
    const auto& call = std::get<OperatorCall>(each->action);
    bool escapes = false;
    each_written(call, [&](int64_t index) { escapes = escapes || escapes_[index]; });
    const bool is_lasting = is_loop(call) && is_fixed(call);
    each_read(call.arguments, [&](int64_t index) {
      // Other operators may return a tensor that shares memory with an argument.
      if (escapes && !is_loop(call)) escapes_[index] = true;
      if (is_lasting) is_read_[index] = true;
    });
  }
}

bool Preparation::fits() const {
  return threads_ == at::get_num_threads();
}

bool Preparation::run(int64_t position) {
  return is_ready_ ? run_again(position) : run_first(position);
}

size_t Preparation::lasting_calls() const {
  size_t count = 0;
  for (const Step& step : steps_) {
    if (step.loops.has_value()) count += step.end - step.begin;
  }
  return count;
}

void Preparation::forget() {
  for (size_t index = 0; index < registers_.size(); ++index) {
    if (!stays_[index]) registers_[index].reset();
  }
}

bool Preparation::run_first(int64_t position) {
  for (size_t begin = 0, end = 0; begin < instructions_.size(); begin = end) {
    end = end_of_group(instructions_, begin);
    Step step{begin, end, {}, {}, {}, {}};
    if (!prepare(step, position)) return false;
    for (size_t next = begin; next < end; ++next) {
      for (const int64_t index : instructions_[next].last_uses) {
        if (stays(index)) continue;
        step.last_uses.push_back(index);
        registers_[index].reset();
      }
    }
    // Views of what stays are made once.
    if (!is_lasting_view(instructions_[begin])) steps_.push_back(std::move(step));
  }
  is_ready_ = true;
  return true;
}

void Preparation::run_loops(const Step& step, bool is_recorded) {
  std::optional<at::RecordFunction> record;
  if (is_recorded) record.emplace(at::RecordScope::FUNCTION).before(step.name);
  step.loops->run();
}

bool Preparation::run_again(int64_t position) {
  // Asked once, since it takes 0.03 us.
  const bool is_recorded = at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION).has_value();
  for (const Step& step : steps_) {
    if (step.loops.has_value()) {
      run_loops(step, is_recorded);
      continue;
    }
    if (!execute(instructions_, step.begin, step.end, position, registers_)) return false;
    for (const Copy& each : step.copies) {
      at::Tensor& result = registers_[each.index];
      if (!has_layout_of(result, each.place)) return start_over(step.end, position);
      copy_values(result, each.place);
      result = each.place;
    }
    for (const int64_t index : step.last_uses) registers_[index].reset();
  }
  rethrow_raised();
  return true;
}

bool Preparation::start_over(size_t begin, int64_t position) {
  steps_.clear();
  stays_ = is_constant_;
  bytes_ = 0;
  is_ready_ = false;
  return execute_from(instructions_, begin, position, registers_);
}

bool Preparation::prepare(Step& step, int64_t position) {
  if (are_lasting_calls(step.begin, step.end)) return prepare_loops(step, position);
  if (!execute(instructions_, step.begin, step.end, position, registers_)) return false;
  if (is_lasting_view(instructions_[step.begin])) {
    stays_[std::get<View>(instructions_[step.begin].action).result.index] = true;
  } else {
    prepare_copies(step);
  }
  return true;
}

bool Preparation::prepare_loops(Step& step, int64_t position) {
  LoopBatch batch;
  {
    const LastingResults results;
    for (size_t next = step.begin; next < step.end; ++next) {
      if (!execute(instructions_, next, next + 1, position, registers_)) return false;
    }
  }
  std::vector<ParallelLoop> loops = batch.take();
  const bool stay = are_closed(loops, step.begin, step.end);
  JoinedCalls<ParallelLoop> joined(std::move(loops));
  joined.run();
  int64_t bytes = 0;
  const auto each_result = [&](const auto& function) {
    for (size_t next = step.begin; next < step.end; ++next) {
      each_written(std::get<OperatorCall>(instructions_[next].action), function);
    }
  };
  each_result([&](int64_t index) { bytes += registers_[index].nbytes(); });
  if (!stay || !has_room(bytes)) return true;
  each_result([&](int64_t index) { stays_[index] = true; });
  step.loops = std::move(joined);
  step.name = std::get<OperatorCall>(instructions_[step.begin].action).op.operator_name().name;
  return true;
}

void Preparation::prepare_copies(Step& step) {
  for (size_t next = step.begin; next < step.end; ++next) {
    const auto* const call = std::get_if<OperatorCall>(&instructions_[next].action);
    if (call == nullptr) continue;
    for (size_t i = 0; i < call->results.size(); ++i) {
      const auto* const target = std::get_if<Register>(&call->results[i]);
      const bool is_new = call->op.schema().returns()[i].alias_info() == nullptr;
      if (target == nullptr || !is_new) continue;
      const int64_t index = target->index;
      const at::Tensor& result = registers_[index];
      const bool can_stay = is_read_[index] && !escapes_[index] && is_dense_on_cpu(result) &&
                            result.is_non_overlapping_and_dense() && has_room(result.nbytes());
      if (!can_stay) continue;
      const LastingResults results;
      const at::Tensor place =
          at::empty_strided(result.sizes(), result.strides(), result.options());
      copy_values(result, place);
      registers_[index] = place;
      stays_[index] = true;
      step.copies.push_back({index, place});
    }
  }
}

bool Preparation::is_lasting_view(const Instruction& instruction) const {
  const auto* const view = std::get_if<View>(&instruction.action);
  return view != nullptr && is_fixed(*view) && stays(view->base.index);
}

bool Preparation::are_lasting_calls(size_t begin, size_t end) const {
  const auto is_lasting = [&](const Instruction& instruction) {
    const auto* const call = std::get_if<OperatorCall>(&instruction.action);
    if (call == nullptr || !is_loop(*call) || !is_fixed(*call)) return false;
    bool can = true;
    each_read(call->arguments, [&](int64_t index) { can = can && stays(index); });
    each_written(*call, [&](int64_t index) { can = can && !escapes_[index]; });
    return can;
  };
  return std::all_of(instructions_.begin() + static_cast<int64_t>(begin),
                     instructions_.begin() + static_cast<int64_t>(end), is_lasting);
}

// Whether each call has left one loop, and none reads a copy that its launcher has made.
bool Preparation::are_closed(const std::vector<ParallelLoop>& loops, size_t begin,
                             size_t end) const {
  std::set<const c10::StorageImpl*> known;
  for (size_t next = begin; next < end; ++next) {
    const auto& call = std::get<OperatorCall>(instructions_[next].action);
    const auto add = [&](int64_t index) { known.insert(storage_of(registers_[index])); };
    each_read(call.arguments, add);
    each_written(call, add);
  }
  const auto is_known = [&](const at::Tensor& it) {
    return !it.defined() || known.count(storage_of(it)) > 0;
  };
  return loops.size() == end - begin &&
         std::all_of(loops.begin(), loops.end(), [&](const ParallelLoop& loop) {
           return std::all_of(loop.tensors().begin(), loop.tensors().end(), is_known);
         });
}

bool Preparation::has_room(int64_t bytes) {
  if (bytes_ + bytes > kMostBytes) return false;
  bytes_ += bytes;
  return true;
}

}  // namespace foo::graphs
