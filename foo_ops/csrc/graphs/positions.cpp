#include "graphs/positions.h"

#include <ATen/core/enum_tag.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "launch/lasting.h"
#include "launch/overlap.h"

namespace foo::graphs {
namespace {

// Most bytes of a constant, which is compared in each run, and of results that are kept.
constexpr int64_t kMostBytesOfConstant = int64_t{1} << 12, kMostKept = int64_t{4} << 20;

bool is_pure(const OperatorCall& call) {
  const c10::FunctionSchema& schema = call.op.schema();
  const bool has_views =
      std::any_of(schema.returns().begin(), schema.returns().end(),
                  [](const c10::Argument& it) { return it.alias_info() != nullptr; });
  return !schema.is_mutable() && !has_views && !call.op.hasTag(at::Tag::nondeterministic_seeded);
}

bool is_small(const at::Tensor& tensor) {
  if (!tensor.defined() || !is_dense_on_cpu(tensor) || tensor.numel() == 0) return false;
  const Span span(tensor);
  return span.end - span.begin <= kMostBytesOfConstant;
}

}  // namespace

PositionResults::PositionResults(const std::vector<Instruction>& instructions,
                                 const Registers& registers, const std::vector<int64_t>& outputs)
    : has_(instructions.size()), is_known_(registers.size()) {
  for (const at::Tensor& each : registers) is_constant_.push_back(is_small(each));
  std::vector<int64_t> changed = outputs;
  for (const Instruction& each : instructions) {
    const auto* const call = std::get_if<OperatorCall>(&each.action);
    if (call == nullptr || !call->op.schema().is_mutable()) continue;
    each_read(call->arguments, [&](int64_t index) { changed.push_back(index); });
  }
  find(instructions, sharing_memory(instructions, changed, registers.size()));
  find_readers(instructions);
  take_constants(instructions, registers);
}

void PositionResults::find(const std::vector<Instruction>& instructions,
                           const std::vector<bool>& changes) {
  for (size_t i = 0; i < instructions.size(); ++i) {
    bool reads_others = false, may_change = false;
    const auto read = [&](int64_t index) {
      reads_others = reads_others || !(is_known_[index] || is_constant_[index]);
    };
    const auto write = [&](int64_t index) { may_change = may_change || changes[index]; };
    const auto know = [&](int64_t index) { is_known_[index] = true; };
    if (const auto* const view = std::get_if<View>(&instructions[i].action)) {
      has_[i] = is_known_[view->base.index] && !changes[view->result.index];
      if (has_[i]) know(view->result.index);
      continue;
    }
    const auto& call = std::get<OperatorCall>(instructions[i].action);
    each_read(call.arguments, read);
    each_written(call, write);
    has_[i] = is_pure(call) && !reads_others && !may_change;
    if (has_[i]) each_written(call, know);
  }
}

void PositionResults::take_constants(const std::vector<Instruction>& instructions,
                                     const Registers& registers) {
  std::set<int64_t> read;
  for (size_t i = 0; i < instructions.size(); ++i) {
    const auto* const call = std::get_if<OperatorCall>(&instructions[i].action);
    if (call == nullptr || !has_[i]) continue;
    each_read(call->arguments, [&](int64_t index) {
      if (is_constant_[index]) read.insert(index);
    });
  }
  for (const int64_t index : read) {
    const Span span(registers[index]);
    constants_.emplace_back(span, std::vector<char>(span.begin, span.end));
  }
}

void PositionResults::find_readers(const std::vector<Instruction>& instructions) {
  std::set<int64_t> read;
  const auto add = [&](int64_t index) {
    if (is_known_[index]) read.insert(index);
  };
  for (size_t i = 0; i < instructions.size(); ++i) {
    if (has_[i]) continue;
    if (const auto* const view = std::get_if<View>(&instructions[i].action)) {
      add(view->base.index);
    } else {
      each_read(std::get<OperatorCall>(instructions[i].action).arguments, add);
    }
  }
  read_by_others_.assign(read.begin(), read.end());
}

void PositionResults::stay_in(std::vector<at::Tensor> places) {
  places_ = std::move(places);
  kept_.clear();
  bytes_of_position_ = 0;
  for (const at::Tensor& each : places_) bytes_of_position_ += each.nbytes();
}

bool PositionResults::are_constants_as_before() const {
  return std::all_of(constants_.begin(), constants_.end(), [](const auto& it) {
    const auto& [span, values] = it;
    return std::memcmp(span.begin, values.data(), values.size()) == 0;
  });
}

bool PositionResults::restore(int64_t position) {
  if (places_.empty()) return false;
  if (!are_constants_as_before()) {
    kept_.clear();
    for (auto& [span, values] : constants_) values.assign(span.begin, span.end);
    return false;
  }
  const auto found = kept_.find(position);
  if (found == kept_.end()) return false;
  const char* from = found->second.data();
  for (const at::Tensor& each : places_) {
    std::memcpy(each.mutable_data_ptr(), from, each.nbytes());
    from += each.nbytes();
  }
  return true;
}

void PositionResults::keep(int64_t position) {
  const auto count = static_cast<int64_t>(kept_.size()) + 1;
  if (places_.empty() || count * bytes_of_position_ > kMostKept) return;
  std::vector<char>& bytes = kept_[position];
  for (const at::Tensor& each : places_) {
    const auto* const first = static_cast<const char*>(each.const_data_ptr());
    bytes.insert(bytes.end(), first, first + each.nbytes());
  }
}

}  // namespace foo::graphs
