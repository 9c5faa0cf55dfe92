#include "graphs/preparation.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <set>

#include "graphs/shortcuts.h"
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

bool has_results(const Instruction& instruction) {
  bool has = false;
  each_written(std::get<OperatorCall>(instruction.action), [&](int64_t) { has = true; });
  return has;
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
                         const std::vector<int64_t>& inputs, const std::vector<int64_t>& outputs,
                         Registers registers)
    : instructions_(instructions),
      inputs_(inputs),
      threads_(at::get_num_threads()),
      registers_(std::move(registers)),
      is_input_(registers_.size()),
      is_read_(registers_.size()),
      is_view_(registers_.size()),
      escapes_(sharing_memory(instructions, outputs, registers_.size())),
      positions_(instructions, registers_, outputs) {
  for (const at::Tensor& each : registers_) is_constant_.push_back(each.defined());
  stays_ = is_constant_;
  for (const int64_t index : inputs) is_input_[index] = true;
  for (const Instruction& each : instructions) {
    if (const auto index = view_written(each)) is_view_[*index] = true;
  }
  for (auto each = instructions.rbegin(); each != instructions.rend(); ++each) {
    if (const auto* view = std::get_if<View>(&each->action)) {
      if (is_read_[view->result.index] && is_fixed(*view)) is_read_[view->base.index] = true;
      continue;
    }
    const auto& call = std::get<OperatorCall>(each->action);
    if (!is_loop(call) || !is_fixed(call)) continue;
    each_read(call.arguments, [&](int64_t index) { is_read_[index] = true; });
  }
}

bool Preparation::fits() const {
  return threads_ == at::get_num_threads();
}

bool Preparation::run(int64_t position, const std::vector<at::Tensor>& inputs) {
  for (size_t i = 0; i < inputs.size(); ++i) {
    at::Tensor& input = registers_[inputs_[i]];
    // Counting who holds the memory of a cache means to wait for it.
    if (!input.is_same(inputs[i])) input = inputs[i];
  }
  return is_ready_ ? run_again(position) : run_first(position);
}

size_t Preparation::lasting_calls() const {
  size_t count = 0;
  for (const Step& step : steps_) {
    count += step.call != nullptr ? 1 : 0;
    for (const Loops& each : step.loops) count += each.joined.calls().size();
  }
  return count;
}

void Preparation::forget_results() {
  for (const int64_t index : left_) let_go(index);
}

void Preparation::forget() {
  forget_results();
  for (const int64_t index : inputs_) registers_[index].reset();
}

void Preparation::let_go(int64_t index) {
  is_view_[index] ? release_view(registers_[index]) : registers_[index].reset();
}

bool Preparation::run_first(int64_t position) {
  for (size_t index = 0; index < registers_.size(); ++index) {
    if (!is_constant_[index]) positions_.see(index, registers_[index]);
  }
  for (size_t begin = 0, end = 0; begin < instructions_.size(); begin = end) {
    end = end_of_group(instructions_, begin);
    Step step{.begin = begin, .end = end};
    if (!prepare(step, position)) return false;
    for (size_t next = begin; next < end; ++next) {
      if (const auto* const call = std::get_if<OperatorCall>(&instructions_[next].action)) {
        each_written(*call, [&](int64_t index) { positions_.see(index, registers_[index]); });
      }
      for (const int64_t index : instructions_[next].last_uses) {
        if (stays(index) || is_input_[index]) continue;
        step.last_uses.push_back(index);
        let_go(index);
      }
    }
    // Views of what stays are made once.
    if (!is_lasting_view(instructions_[begin])) steps_.push_back(std::move(step));
  }
  prepare_positions();
  merge_loops();
  find_left();
  is_ready_ = true;
  return true;
}

// A model's weights have pushed what describes its calls out of the first caches. While a step's
// loops run, the calls up to the next such step are fetched.
void Preparation::fetch_calls_after(const Step& step) const {
  const Step* const end = steps_.data() + steps_.size();
  for (const Step* next = &step + 1; next < end; ++next) {
    if (!next->works.empty()) {
      next->works.front().prefetch();
      return;
    }
    if (next->call == nullptr) continue;
    prefetch_bytes(next->call.get(), next->bytes);
    for (const int64_t index : next->arguments) {
      prefetch_bytes(registers_[index].unsafeGetTensorImpl(), sizeof(c10::TensorImpl));
    }
  }
}

void Preparation::run_loops(const Step& step, bool is_recorded) {
  if (is_recorded) {
    for (const Loops& each : step.loops) {
      at::RecordFunction record(at::RecordScope::FUNCTION);
      record.before(each.name);
      each.joined.run();
    }
  } else if (step.loops.front().joined.is_for_one_thread()) {
    const ScratchMemory scratch(scratch_pool(), 0, step.bytes);
    fetch_calls_after(step);
    const std::vector<ParallelLoop::Work>& works = step.works;
    for (size_t i = 0; i < works.size(); ++i) {
      if (i + 1 < works.size()) works[i + 1].prefetch();
      works[i].run(scratch.get());
    }
  } else {
    step.loops.front().joined.run();
  }
}

bool Preparation::run_call(const Step& step, bool is_recorded) {
  std::optional<at::RecordFunction> record;
  if (is_recorded) {
    const auto& call = std::get<OperatorCall>(instructions_[step.begin].action);
    record.emplace(at::RecordScope::FUNCTION).before(call.op.operator_name().name);
  }
  c10::SmallVector<const at::Tensor*, 8> arguments;
  for (const int64_t index : step.arguments) arguments.push_back(&registers_[index]);
  return step.call->run(arguments);
}

bool Preparation::run_again(int64_t position) {
  // Asked once, since it takes 0.03 us.
  const bool is_recorded = at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION).has_value();
  bool is_known = false, is_asked = false;
  for (Step& step : steps_) {
    if (!is_asked && step.begin >= positions_.begin()) {
      is_known = positions_.restore(position, registers_);
      is_asked = true;
    }
    if (is_known && step.is_of_position) continue;
    if (!step.loops.empty()) {
      run_loops(step, is_recorded);
    } else if (step.call != nullptr) {
      if (!run_call(step, is_recorded)) {
        // A call that has results writes them where later loops read them.
        if (has_results(instructions_[step.begin]))
          return start_over(step.begin, position, is_known);
        if (!prepare_call(step, position)) return false;
      }
    } else if (!execute(instructions_, step.begin, step.end, position, registers_)) {
      return false;
    }
    for (const Copy& each : step.copies) {
      at::Tensor& result = registers_[each.index];
      if (!has_layout_of(result, each.place)) return start_over(step.end, position, is_known);
      copy_values(result, each.place);
      result = each.place;
    }
    for (const int64_t index : step.last_uses) let_go(index);
  }
  rethrow_raised();
  if (is_asked && !is_known) positions_.keep();
  return true;
}

bool Preparation::start_over(size_t begin, int64_t position, bool is_known) {
  for (const Step& step : steps_) {
    // Instructions after `begin` may read results that were left out before it.
    if (!is_known || !step.is_of_position || step.begin >= begin) continue;
    // One by one: they may read each other, which a batch must not.
    for (size_t next = step.begin; next < step.end; ++next) {
      if (!execute(instructions_, next, next + 1, position, registers_)) return false;
    }
  }
  steps_.clear();
  stays_ = is_constant_;
  positions_.stay_in({});
  bytes_ = 0;
  is_ready_ = false;
  find_left();
  return execute_from(instructions_, begin, position, registers_);
}

bool Preparation::prepare(Step& step, int64_t position) {
  if (are_lasting_calls(step.begin, step.end)) return prepare_loops(step, position);
  if (may_last(step)) return prepare_call(step, position);
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
  step.bytes = joined.bytes();
  const auto& first = std::get<OperatorCall>(instructions_[step.begin].action);
  step.loops.push_back({first.op.operator_name().name, std::move(joined)});
  return true;
}

bool Preparation::prepare_call(Step& step, int64_t position) {
  const auto& call = std::get<OperatorCall>(instructions_[step.begin].action);
  LastingCallTaker taker(call.op.operator_name().name);
  step.call = nullptr;
  {
    const LastingResults results;
    if (!execute(instructions_, step.begin, step.end, position, registers_)) return false;
  }
  int64_t bytes = 0;
  each_written(call, [&](int64_t index) { bytes += registers_[index].nbytes(); });
  if (taker.call == nullptr || !has_room(bytes)) {
    prepare_copies(step);
    return true;
  }
  each_written(call, [&](int64_t index) { stays_[index] = true; });
  step.arguments.clear();
  each_read(call.arguments, [&](int64_t index) { step.arguments.push_back(index); });
  step.call = std::move(taker.call);
  step.bytes = step.call->bytes_read();
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

void Preparation::prepare_positions() {
  positions_.find(registers_, stays_);
  const std::vector<int64_t>& keys = positions_.keys();
  const auto is_key = [&](int64_t index) {
    return std::find(keys.begin(), keys.end(), index) != keys.end();
  };
  std::vector<at::Tensor> places;
  for (Step& step : steps_) {
    // Kept for `start_over`, which runs what was left out.
    std::erase_if(step.last_uses, is_key);
    step.is_of_position = true;
    for (size_t next = step.begin; next < step.end; ++next) {
      step.is_of_position = step.is_of_position && positions_.has(next);
    }
    if (!step.is_of_position) continue;
    for (const Copy& each : step.copies) places.push_back(each.place);
    if (step.loops.empty() && step.call == nullptr) continue;
    for (size_t next = step.begin; next < step.end; ++next) {
      each_written(std::get<OperatorCall>(instructions_[next].action),
                   [&](int64_t index) { places.push_back(registers_[index]); });
    }
  }
  positions_.stay_in(std::move(places));
}

void Preparation::merge_loops() {
  const auto is_small = [](const Step& step) {
    return !step.loops.empty() && step.loops.front().joined.is_for_one_thread();
  };
  std::vector<Step> merged;
  for (Step& step : steps_) {
    const bool joins =
        !merged.empty() && is_small(merged.back()) && is_small(step) &&
        merged.back().is_of_position == step.is_of_position &&
        (merged.back().begin < positions_.begin()) == (step.begin < positions_.begin());
    if (!joins) {
      merged.push_back(std::move(step));
      continue;
    }
    Step& last = merged.back();
    last.end = step.end;
    last.bytes = std::max(last.bytes, step.bytes);
    std::move(step.loops.begin(), step.loops.end(), std::back_inserter(last.loops));
    last.last_uses.insert(last.last_uses.end(), step.last_uses.begin(), step.last_uses.end());
  }
  steps_ = std::move(merged);
  for (Step& step : steps_) {
    if (!is_small(step)) continue;
    for (const Loops& each : step.loops) {
      for (const ParallelLoop& loop : each.joined.calls()) step.works.push_back(loop.all_work());
    }
  }
}

void Preparation::find_left() {
  std::vector<bool> are_released(registers_.size());
  for (const Step& step : steps_) {
    for (const int64_t index : step.last_uses) are_released[index] = true;
  }
  left_.clear();
  for (size_t index = 0; index < registers_.size(); ++index) {
    if (!stays_[index] && !is_input_[index] && !are_released[index]) left_.push_back(index);
  }
}

bool Preparation::is_lasting_view(const Instruction& instruction) const {
  const auto* const view = std::get_if<View>(&instruction.action);
  return view != nullptr && is_fixed(*view) && stays(view->base.index);
}

// Whether a call might be made again: its results are tensors that do not leave the program.
bool Preparation::may_last(const Step& step) const {
  const auto* const call = std::get_if<OperatorCall>(&instructions_[step.begin].action);
  if (call == nullptr || step.end - step.begin > 1 || !is_fixed(*call)) return false;
  return std::all_of(call->results.begin(), call->results.end(), [&](const Result& it) {
    const auto* const target = std::get_if<Register>(&it);
    return std::holds_alternative<std::monostate>(it) ||
           (target != nullptr && !escapes_[target->index]);
  });
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
