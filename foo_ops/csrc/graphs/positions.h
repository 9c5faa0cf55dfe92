// Results of a program that depend on nothing but its position, such as rotary tables.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "graphs/instruction.h"
#include "launch/overlap.h"

namespace foo::graphs {

// Each sequence comes to the same positions: what was computed at one is kept, and copied to where
// loops read it in the next run there. The tables of a Llama of any size take 23 us on a Zen 4, and
// 55 on an Intel with AMX.
class PositionResults {
 public:
  // `registers` has the constants.
  PositionResults(const std::vector<Instruction>& instructions, const Registers& registers,
                  const std::vector<int64_t>& outputs);

  // Whether an instruction computes such results, and nothing else.
  bool has(size_t instruction) const { return has_[instruction]; }

  // The registers of such results that other instructions read.
  const std::vector<int64_t>& read_by_others() const { return read_by_others_; }

  // Takes the tensors in which all of them stay; without any, nothing is kept.
  void stay_in(std::vector<at::Tensor> places);

  // Writes the results at a position to their places. Returns false if they are not known.
  bool restore(int64_t position);

  // Keeps what is in the places.
  void keep(int64_t position);

 private:
  // `changes` tells for each register whether anything may write to its memory, in this run or
  // after it.
  void find(const std::vector<Instruction>& instructions, const std::vector<bool>& changes);
  void find_readers(const std::vector<Instruction>& instructions);
  void take_constants(const std::vector<Instruction>& instructions, const Registers& registers);
  // Whether the constants have the values that they had.
  bool are_constants_as_before() const;

  // For each instruction, and for each register: whether it is a small constant, and whether it is
  // such a result.
  std::vector<bool> has_, is_constant_, is_known_;
  std::vector<int64_t> read_by_others_;
  // Where constants are that are read, with the values from which the results were computed.
  std::vector<std::pair<Span, std::vector<char>>> constants_;
  std::vector<at::Tensor> places_;
  int64_t bytes_of_position_ = 0;
  std::unordered_map<int64_t, std::vector<char>> kept_;
};

}  // namespace foo::graphs
