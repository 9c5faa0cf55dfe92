#include "graphs/positions.h"

#include <ATen/core/enum_tag.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "graphs/shortcuts.h"
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

void append(std::string& key, const void* memory, size_t bytes) {
  key.append(static_cast<const char*>(memory), bytes);
}

}  // namespace

PositionResults::PositionResults(const std::vector<Instruction>& instructions,
                                 const Registers& registers, const std::vector<int64_t>& outputs)
    : instructions_(instructions),
      has_(instructions.size()),
      is_key_(registers.size()),
      is_known_(registers.size()) {
  for (const at::Tensor& each : registers) is_constant_.push_back(is_small(each));
  std::vector<int64_t> changed = outputs;
  for (const Instruction& each : instructions) {
    const auto* const call = std::get_if<OperatorCall>(&each.action);
    if (call == nullptr || !call->op.schema().is_mutable()) continue;
    each_read(call->arguments, [&](int64_t index) { changed.push_back(index); });
  }
  changes_ = sharing_memory(instructions, changed, registers.size());
}

void PositionResults::see(int64_t index, const at::Tensor& tensor) {
  is_key_[index] = !is_constant_[index] && !changes_[index] && tensor.defined() &&
                   are_few_integers(tensor) && tensor.is_contiguous();
}

void PositionResults::find(const Registers& registers, const std::vector<bool>& stays) {
  for (bool is_found = false; !is_found;) {
    find_results();
    is_found = true;
    for (const int64_t index : read_by_others()) {
      if (stays[index]) continue;
      changes_[index] = true;
      is_found = false;
    }
  }
  find_keys();
  take_constants(registers);
}

void PositionResults::find_results() {
  std::fill(is_known_.begin(), is_known_.end(), false);
  const auto know = [&](int64_t index) { is_known_[index] = true; };
  for (size_t i = 0; i < instructions_.size(); ++i) {
    if (const auto* const view = std::get_if<View>(&instructions_[i].action)) {
      const int64_t base = view->base.index;
      has_[i] = (is_known_[base] || is_key_[base]) && !changes_[view->result.index];
      if (has_[i]) know(view->result.index);
      continue;
    }
    const auto& call = std::get<OperatorCall>(instructions_[i].action);
    bool reads_others = false, may_change = false;
    each_read(call.arguments, [&](int64_t index) {
      reads_others = reads_others || !(is_known_[index] || is_constant_[index] || is_key_[index]);
    });
    each_written(call, [&](int64_t index) { may_change = may_change || changes_[index]; });
    has_[i] = is_pure(call) && !reads_others && !may_change;
    if (has_[i]) each_written(call, know);
  }
}

void PositionResults::find_keys() {
  std::set<int64_t> keys;
  const auto use = [&](int64_t index) {
    if (is_key_[index] && !is_known_[index]) keys.insert(index);
  };
  for (size_t i = 0; i < instructions_.size(); ++i) {
    if (has_[i]) each_read(instructions_[i], use);
  }
  keys_.assign(keys.begin(), keys.end());
  begin_ = 0;
  for (size_t i = 0; i < instructions_.size(); ++i) {
    const auto* const call = std::get_if<OperatorCall>(&instructions_[i].action);
    if (call == nullptr) continue;
    each_written(*call, [&](int64_t index) {
      if (keys.count(index) > 0) begin_ = i + 1;
    });
  }
}

void PositionResults::take_constants(const Registers& registers) {
  std::set<int64_t> read;
  for (size_t i = 0; i < instructions_.size(); ++i) {
    if (!has_[i]) continue;
    each_read(instructions_[i], [&](int64_t index) {
      if (is_constant_[index]) read.insert(index);
    });
  }
  constants_.clear();
  for (const int64_t index : read) {
    const Span span(registers[index]);
    constants_.emplace_back(span, std::vector<char>(span.begin, span.end));
  }
}

std::vector<int64_t> PositionResults::read_by_others() const {
  std::set<int64_t> read;
  const auto add = [&](int64_t index) {
    if (is_known_[index]) read.insert(index);
  };
  for (size_t i = 0; i < instructions_.size(); ++i) {
    if (!has_[i]) each_read(instructions_[i], add);
  }
  return {read.begin(), read.end()};
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

bool PositionResults::restore(int64_t position, const Registers& registers) {
  key_.clear();
  if (places_.empty()) return false;
  append(key_, &position, sizeof(position));
  for (const int64_t index : keys_) {
    const at::Tensor& integers = registers[index];
    if (!are_few_integers(integers) || !integers.is_contiguous()) {
      key_.clear();
      return false;
    }
    const int64_t dimensions = integers.dim();
    append(key_, &dimensions, sizeof(dimensions));
    append(key_, integers.sizes().data(), dimensions * sizeof(int64_t));
    append(key_, integers.const_data_ptr(), integers.nbytes());
  }
  if (!are_constants_as_before()) {
    kept_.clear();
    for (auto& [span, values] : constants_) values.assign(span.begin, span.end);
    return false;
  }
  const auto found = kept_.find(key_);
  if (found == kept_.end()) return false;
  const char* from = found->second.data();
  for (const at::Tensor& each : places_) {
    std::memcpy(each.mutable_data_ptr(), from, each.nbytes());
    from += each.nbytes();
  }
  return true;
}

void PositionResults::keep() {
  const auto count = static_cast<int64_t>(kept_.size()) + 1;
  if (key_.empty() || count * bytes_of_position_ > kMostKept) return;
  std::vector<char>& bytes = kept_[key_];
  for (const at::Tensor& each : places_) {
    const auto* const first = static_cast<const char*>(each.const_data_ptr());
    bytes.insert(bytes.end(), first, first + each.nbytes());
  }
}

}  // namespace foo::graphs
