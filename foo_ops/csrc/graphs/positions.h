// Results of a program that depend on nothing but its position and a few integers, such as rotary
// tables.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "graphs/instruction.h"
#include "launch/overlap.h"

namespace foo::graphs {

// Each sequence comes to the same positions: what was computed at one is kept, and copied to where
// loops read it in the next run there. The tables of a Llama of any size take 23 us on a Zen 4, and
// 55 on an Intel with AMX.
//
// Integers that the program is given or computes, such as position_ids, are read in each run: with
// other values there are other results.
class PositionResults {
 public:
  // `registers` has the constants.
  PositionResults(const std::vector<Instruction>& instructions, const Registers& registers,
                  const std::vector<int64_t>& outputs);

  // Takes note of registers that are a few integers in the first run.
  void see(int64_t index, const at::Tensor& tensor);

  // Finds the results, after the first run. Those that others read must be in tensors that stay.
  void find(const Registers& registers, const std::vector<bool>& stays);

  // Whether an instruction computes such results, and nothing else.
  bool has(size_t instruction) const { return has_[instruction]; }

  // The registers of the integers, and the instruction before which all of them are computed.
  const std::vector<int64_t>& keys() const { return keys_; }
  size_t begin() const { return begin_; }

  // Takes the tensors in which all of them stay; without any, nothing is kept.
  void stay_in(std::vector<at::Tensor> places);

  // Writes the results of a run to their places. Returns false if they are not known.
  bool restore(int64_t position, const Registers& registers);

  // Keeps what is in the places, for the run that `restore` was last asked for.
  void keep();

 private:
  void find_results();
  void find_keys();
  // Returns the registers of results that other instructions read.
  std::vector<int64_t> read_by_others() const;
  void take_constants(const Registers& registers);
  // Whether the constants have the values that they had.
  bool are_constants_as_before() const;

  const std::vector<Instruction>& instructions_;
  // For each instruction.
  std::vector<bool> has_;
  // For each register: whether it is a small constant, a few integers, such a result, and whether
  // it must not be one: if anything may write to its memory, in a run or after it.
  std::vector<bool> is_constant_, is_key_, is_known_, changes_;
  std::vector<int64_t> keys_;
  size_t begin_ = 0;
  // Where constants are that are read, with the values from which the results were computed.
  std::vector<std::pair<Span, std::vector<char>>> constants_;
  std::vector<at::Tensor> places_;
  int64_t bytes_of_position_ = 0;
  // The position and the integers of the last run, if these are a few still.
  std::string key_;
  std::unordered_map<std::string, std::vector<char>> kept_;
};

}  // namespace foo::graphs
