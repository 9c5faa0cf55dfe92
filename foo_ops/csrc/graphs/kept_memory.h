// Blocks of memory that graphs write to each time they are replayed, and so keep.
#pragma once

#include <optional>

namespace foo::graphs {

class KeptMemory {
 public:
  // Takes over one owner of the block.
  explicit KeptMemory(void* memory);
  KeptMemory(KeptMemory&& other) noexcept;
  KeptMemory& operator=(KeptMemory&&) = delete;
  ~KeptMemory();

  // What another graph keeps, such as the results of a forward pass that a backward pass reads, is
  // kept by this one, too.
  static std::optional<KeptMemory> of_other_graph(void* memory);

 private:
  void* memory_;
};

}  // namespace foo::graphs
