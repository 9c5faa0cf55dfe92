// Loops of a program that run again without their launchers, in memory that stays.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "graphs/instruction.h"
#include "graphs/positions.h"
#include "launch/batch.h"
#include "launch/lasting.h"

namespace foo::graphs {

// The first run of a program shows which of its tensors can stay where they are: results of calls
// that are nothing but a loop, which reads and writes only constants and other tensors that stay.
// Later runs call kernels on them at once. Results of other calls that such loops read are copied
// to where the first run had them. A token of 24 layers of 64 takes 0.6 of the time on one thread
// of a Zen 4. Calls of other kinds may be made again on tensors that do not stay, such as caches.
//
// The tensors of a run are overwritten by the next one. None of them is an output, or shares its
// memory with one.
class Preparation {
 public:
  // `registers` has the constants.
  Preparation(const std::vector<Instruction>& instructions, const std::vector<int64_t>& inputs,
              const std::vector<int64_t>& outputs, Registers registers);

  // Whether it is for this thread's number of threads: loops are cut for it.
  bool fits() const;

  const Registers& registers() const { return registers_; }

  // Runs the program, at first as `execute` does. Returns false as that does; then there must be
  // no further run.
  bool run(int64_t position, const std::vector<at::Tensor>& inputs);

  // How many calls run as loops that stay.
  size_t lasting_calls() const;

  // After a run, let go of the tensors that do not stay: of all but inputs, or of these, too.
  void forget_results();
  void forget();

 private:
  // The result of a call that is no loop, and its place for loops.
  struct Copy {
    int64_t index;
    at::Tensor place;
  };
  // Loops that run as one, and the first operator's name, for profilers.
  struct Loops {
    std::string name;
    JoinedCalls<ParallelLoop> joined;
  };
  struct Step {
    // Instructions, which run where there are no loops.
    size_t begin, end;
    // One after the other; all on one thread if there are several.
    std::vector<Loops> loops;
    // The same loops side by side, if they run on one thread.
    std::vector<ParallelLoop::Work> works;
    // A call that is more than a loop, and the registers that it is given.
    std::unique_ptr<LastingCall> call;
    std::vector<int64_t> arguments;
    // Loops need so much scratch memory; of a call so much is read each time.
    int64_t bytes = 0;
    std::vector<Copy> copies;
    std::vector<int64_t> last_uses;
    // Whether all results depend on nothing but the position.
    bool is_of_position = false;
  };

  bool run_first(int64_t position);
  bool run_again(int64_t position);
  void run_loops(const Step& step, bool is_recorded);
  void fetch_calls_after(const Step& step) const;
  // Returns false if that takes a launcher.
  bool run_call(const Step& step, bool is_recorded);
  // Runs the rest from an instruction on without loops that stay; the next run is a first one.
  // `is_known` tells whether results of the position have been left out.
  bool start_over(size_t begin, int64_t position, bool is_known);

  bool prepare(Step& step, int64_t position);
  // Leaves the step without loops if they cannot stay.
  bool prepare_loops(Step& step, int64_t position);
  // Leaves the step with a call if it can be made again, and with copies if not.
  bool prepare_call(Step& step, int64_t position);
  void prepare_copies(Step& step);
  // Lets results that depend on the position only be kept, if all that others read stay.
  void prepare_positions();
  // Makes one step of neighbours that run on one thread.
  void merge_loops();
  void find_left();

  void let_go(int64_t index);
  bool is_lasting_view(const Instruction& instruction) const;
  bool are_lasting_calls(size_t begin, size_t end) const;
  bool may_last(const Step& step) const;
  bool are_closed(const std::vector<ParallelLoop>& loops, size_t begin, size_t end) const;
  bool has_room(int64_t bytes);
  bool stays(int64_t index) const { return stays_[index]; }

  const std::vector<Instruction>& instructions_;
  const std::vector<int64_t>& inputs_;
  int64_t threads_;
  Registers registers_;
  // For each register: whether it is an input, whether it is a constant, whether its tensor stays,
  // whether a loop may read it, whether an output may share its memory, and whether it gets a view
  // that is made again.
  std::vector<bool> is_input_, is_constant_, stays_, is_read_, escapes_, is_view_;
  std::vector<Step> steps_;
  // Registers of results that no step lets go of.
  std::vector<int64_t> left_;
  PositionResults positions_;
  int64_t bytes_ = 0;
  bool is_ready_ = false;
};

}  // namespace foo::graphs
