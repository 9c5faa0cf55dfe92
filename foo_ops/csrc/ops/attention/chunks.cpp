#include "ops/attention/chunks.h"

#include <algorithm>

namespace foo {

namespace {

// Cuts the blocks of a key head along their queries, into chunks of the same work: with a window
// or documents, each of them visits few keys.
void number_chunks(std::vector<Piece>::iterator begin, std::vector<Piece>::iterator end,
                   int64_t chunks) {
  std::stable_sort(begin, end, [](const Piece& a, const Piece& b) { return a.block < b.block; });
  const auto work = [](const Piece& block) { return std::max<int64_t>(1, work_of(block)); };
  int64_t total = 0, done = 0;
  for (auto block = begin; block != end; ++block) total += work(*block);
  for (auto block = begin; block != end; ++block) {
    // The chunk in which the middle of the block's work is.
    block->chunk = (2 * done + work(*block)) * chunks / (2 * total);
    done += work(*block);
  }
}

}  // namespace

Rows Chunk::keys() const {
  Rows keys{blocks[0].key_start, blocks[0].key_stop};
  for (const Piece& block : blocks) {
    keys = {std::min(keys.begin, block.key_start), std::max(keys.end, block.key_stop)};
  }
  return keys;
}

std::vector<std::vector<Chunk>> cut_into_jobs(const Parameters& parameters,
                                              std::vector<Piece> blocks,
                                              const std::optional<BiasGradient>& bias,
                                              const SharedSums& shared) {
  std::vector<std::vector<Chunk>> jobs(parameters.batch * parameters.key_heads * parameters.chunks);
  const auto key_head_of = [&](const Piece& block) {
    return block.batch * parameters.key_heads + block.head / parameters.group;
  };
  for (auto begin = blocks.begin(); begin != blocks.end();) {
    const int64_t key_head = key_head_of(*begin);
    const auto end = std::find_if(
        begin, blocks.end(), [&](const Piece& block) { return key_head_of(block) != key_head; });
    number_chunks(begin, end, parameters.chunks);
    for (auto block = begin; block != end; ++block) {
      // What the key heads of a family share, they add to at the same blocks.
      if (shared.any()) block->chunk = block->block % parameters.chunks;
      block->slot = key_head * parameters.chunks + block->chunk;
      block->bias = bias.has_value() ? bias->place_of(*block) : 0;
      const int64_t family = shared.family(parameters, *block);
      auto& job = jobs[family * parameters.chunks + block->chunk];
      if (job.empty() || job.back().key_head != key_head) {
        job.push_back({key_head, {}});
      }
      job.back().blocks.push_back(*block);
    }
    begin = end;
  }
  return jobs;
}

std::vector<Rows> rows_of_slots(const std::vector<std::vector<Chunk>>& jobs, int64_t slots) {
  std::vector<Rows> rows(slots, Rows{0, 0});
  for (const std::vector<Chunk>& job : jobs) {
    for (const Chunk& chunk : job) {
      rows[chunk.blocks[0].slot] = chunk.keys();
    }
  }
  return rows;
}

}  // namespace foo
