#include "sanitizer/tracker.h"

#include <c10/core/impl/COW.h>

#include <algorithm>
#include <utility>

#include "device/device.h"
#include "device/heap.h"
#include "device/pinned_memory.h"

namespace foo::sanitizer {
namespace {

Party party_of(const Launch& launch, Deed deed) {
  return {deed, launch.operator_name, launch.stream, launch.stack};
}

bool is_of_device(const at::Tensor& tensor) {
  return tensor.device().type() == device::kFoo;
}

uintptr_t address_of(const void* memory) {
  return reinterpret_cast<uintptr_t>(memory);
}

}  // namespace

Description describe(const at::Tensor& tensor) {
  Description description{{}, tensor.scalar_type(), tensor.device()};
  if (!tensor.is_nested()) description.shape = tensor.sizes().vec();
  const std::vector<ByteRange> ranges = byte_ranges(tensor);
  if (!ranges.empty()) {
    description.address = address_of(tensor.storage().data()) + ranges.front().begin;
    description.bytes = ranges.back().end - ranges.front().begin;
  }
  return description;
}

size_t Tracker::ranges() {
  size_t count = 0;
  for (const auto& [address, allocation] : allocations_) count += allocation.shadow.size();
  return count;
}

LaunchPtr Tracker::launch(std::string operator_name, c10::Stream stream, Stack stack) {
  const Moment moment = clocks_.launch(clocks_.number_of(stream));
  return std::make_shared<Launch>(
      Launch{moment, std::move(operator_name), stream, std::move(stack)});
}

Tracker::Allocations::iterator Tracker::find(uintptr_t address) {
  auto after = allocations_.upper_bound(address);
  if (after == allocations_.begin()) return allocations_.end();
  const auto found = std::prev(after);
  return address < found->first + found->second.bytes ? found : allocations_.end();
}

Shadow Tracker::written_shadow(size_t bytes) {
  Shadow shadow(bytes);
  shadow.visit_all([](Cell& cell) { cell.is_written = true; });
  return shadow;
}

Tracker::Allocations::iterator Tracker::allocation_of(const at::Tensor& tensor) {
  if (!tensor.has_storage() || tensor.numel() == 0) return allocations_.end();
  const c10::Storage& storage = tensor.storage();
  const uintptr_t address = address_of(storage.data());
  if (address == 0) return allocations_.end();
  const auto known = find(address);
  if (known != allocations_.end()) return known;
  const bool is_pinned = tensor.is_cpu() && device::is_pinned(storage.data());
  if (!is_of_device(tensor) && !is_pinned) return known;
  const size_t bytes = storage.nbytes();
  return allocations_.emplace(address, Allocation{bytes, written_shadow(bytes), is_pinned}).first;
}

std::vector<ByteRange> Tracker::ranges_in(Allocations::iterator allocation,
                                          const at::Tensor& tensor) {
  std::vector<ByteRange> ranges = byte_ranges(tensor);
  const size_t offset = address_of(tensor.storage().data()) - allocation->first;
  for (ByteRange& range : ranges) {
    range.begin += offset;
    range.end += offset;
  }
  return ranges;
}

void Tracker::forget_done(Cell& cell) {
  if (cell.write != nullptr && clocks_.host_knows(cell.write->moment)) cell.write = nullptr;
}

void Tracker::note_read(Cell& cell, const LaunchPtr& launch) {
  const auto is_over = [&](const LaunchPtr& read) {
    return read->moment.stream == launch->moment.stream || clocks_.host_knows(read->moment);
  };
  cell.reads.erase(std::remove_if(cell.reads.begin(), cell.reads.end(), is_over), cell.reads.end());
  cell.reads.push_back(launch);
}

void Tracker::read(const at::Tensor& tensor, const LaunchPtr& launch, Reads reads,
                   Findings& findings) {
  const auto allocation = allocation_of(tensor);
  if (allocation == allocations_.end()) return;
  const std::vector<ByteRange> ranges = ranges_in(allocation, tensor);
  LaunchPtr unordered;
  bool has_unwritten = false;
  bool has_written = false;
  allocation->second.shadow.visit(ranges, [&](Cell& cell) {
    (cell.is_written ? has_written : has_unwritten) = true;
    if (cell.write != nullptr && !clocks_.is_before(cell.write->moment, launch->moment.stream)) {
      unordered = cell.write;
    }
    forget_done(cell);
    note_read(cell, launch);
  });
  note_pinned_use(allocation, ranges, launch, /*is_written=*/false);
  allocation->second.last_tensor = describe(tensor);
  if (unordered != nullptr) {
    findings.push_back({kRace, describe(tensor), party_of(*launch, Deed::kRead),
                        party_of(*unordered, Deed::kWrite)});
    collided_.push_back(unordered->moment);
  }
  const bool is_uninitialized = has_unwritten && is_of_device(tensor) &&
                                (reads == Reads::kAll || (reads == Reads::kSome && !has_written));
  if (!is_uninitialized) return;
  findings.push_back({kUninitializedRead, describe(tensor), party_of(*launch, Deed::kRead)});
  allocation->second.shadow.visit(ranges, [](Cell& cell) { cell.is_written = true; });
}

void Tracker::write(const at::Tensor& tensor, const LaunchPtr& launch, Findings& findings) {
  const auto allocation = allocation_of(tensor);
  if (allocation == allocations_.end()) return;
  // Copy-on-write memory does not change.
  if (c10::impl::cow::is_cow_data_ptr(tensor.storage().data_ptr())) {
    return read(tensor, launch, Reads::kNothing, findings);
  }
  std::optional<std::pair<LaunchPtr, Deed>> unordered;
  const auto check = [&](const LaunchPtr& earlier, Deed deed) {
    if (!unordered.has_value() && !clocks_.is_before(earlier->moment, launch->moment.stream)) {
      unordered = {earlier, deed};
    }
  };
  const std::vector<ByteRange> ranges = ranges_in(allocation, tensor);
  allocation->second.shadow.visit(ranges, [&](Cell& cell) {
    if (cell.write != nullptr) check(cell.write, Deed::kWrite);
    for (const LaunchPtr& read : cell.reads) check(read, Deed::kRead);
    cell = {true, launch, {}};
  });
  note_pinned_use(allocation, ranges, launch, /*is_written=*/true);
  allocation->second.last_tensor = describe(tensor);
  if (!unordered.has_value()) return;
  const auto& [earlier, deed] = *unordered;
  findings.push_back(
      {kRace, describe(tensor), party_of(*launch, Deed::kWrite), party_of(*earlier, deed)});
  collided_.push_back(earlier->moment);
}

bool Tracker::has_values(const at::Tensor& tensor) {
  const auto allocation = allocation_of(tensor);
  if (allocation == allocations_.end() || !is_of_device(tensor)) return true;
  bool has_values = false;
  allocation->second.shadow.visit(ranges_in(allocation, tensor),
                                  [&](Cell& cell) { has_values |= cell.is_written; });
  return has_values;
}

void Tracker::unwritten(const at::Tensor& tensor) {
  const auto allocation = allocation_of(tensor);
  if (allocation == allocations_.end()) return;
  allocation->second.shadow.visit(ranges_in(allocation, tensor),
                                  [](Cell& cell) { cell.is_written = false; });
}

void Tracker::end(const LaunchPtr& launch, Findings& findings) {
  for (auto finding = findings.begin(); finding != findings.end();) {
    const bool is_repeated = std::any_of(findings.begin(), finding, [&](const Finding& earlier) {
      return earlier.kind == finding->kind && earlier.tensor.address == finding->tensor.address;
    });
    finding = is_repeated ? findings.erase(finding) : finding + 1;
  }
  for (const Moment& moment : collided_) clocks_.assume_before(moment, launch->moment.stream);
  collided_.clear();
}

void Tracker::result(const at::Tensor& tensor, const LaunchPtr& launch) {
  const auto allocation = allocation_of(tensor);
  if (allocation == allocations_.end()) return;
  allocation->second.shadow.visit(ranges_in(allocation, tensor),
                                  [&](Cell& cell) { cell = {true, launch, {}}; });
  allocation->second.last_tensor = describe(tensor);
}

void Tracker::host_read(const at::Tensor& tensor, const Party& now, Findings& findings) {
  const auto allocation = allocation_of(tensor);
  if (allocation == allocations_.end()) return;
  LaunchPtr pending;
  allocation->second.shadow.visit(ranges_in(allocation, tensor), [&](Cell& cell) {
    if (cell.write != nullptr && !clocks_.host_knows(cell.write->moment)) pending = cell.write;
    cell.write = nullptr;
  });
  if (pending == nullptr) return;
  forget_pinned_use(pending);
  findings.push_back(
      {kUnsynchronizedHostRead, describe(tensor), now, party_of(*pending, Deed::kWrite)});
}

void Tracker::host_write(const at::Tensor& tensor, const Party& now, Findings& findings) {
  const auto allocation = allocation_of(tensor);
  if (allocation == allocations_.end()) return;
  std::optional<std::pair<LaunchPtr, Deed>> pending;
  const auto check = [&](const LaunchPtr& launch, Deed deed) {
    if (!clocks_.host_knows(launch->moment)) pending = {launch, deed};
  };
  allocation->second.shadow.visit(ranges_in(allocation, tensor), [&](Cell& cell) {
    if (cell.write != nullptr) check(cell.write, Deed::kWrite);
    for (const LaunchPtr& read : cell.reads) check(read, Deed::kRead);
    cell = {true, nullptr, {}};
  });
  if (!pending.has_value()) return;
  forget_pinned_use(pending->first);
  findings.push_back(
      {kHostWriteDuringCopy, describe(tensor), now, party_of(*pending->first, pending->second)});
}

Findings Tracker::touched_by_host(const void* address, const Party& now) {
  const auto allocation = find(address_of(address));
  if (allocation == allocations_.end()) {
    const auto device = device::device_of_address(address);
    if (!device.has_value()) return {};
    return {{kHostAccess, {{}, std::nullopt, {device::kFoo, *device}, address_of(address)}, now}};
  }
  Cell touched;
  const size_t offset = address_of(address) - allocation->first;
  allocation->second.shadow.visit({{offset, offset + 1}}, [&](Cell& cell) { touched = cell; });
  const LaunchPtr read = touched.reads.empty() ? nullptr : touched.reads.back();
  if (!allocation->second.is_pinned) {
    std::optional<Party> before;
    if (touched.write != nullptr) before = party_of(*touched.write, Deed::kWrite);
    if (read != nullptr) before = party_of(*read, Deed::kRead);
    return {{kHostAccess, description_of(allocation), now, before}};
  }
  return touch_pinned_memory(allocation, touched, now);
}

Findings Tracker::touch_pinned_memory(Allocations::iterator allocation, const Cell& touched,
                                      const Party& now) {
  const auto is_pending = [&](const LaunchPtr& launch) {
    return launch != nullptr && !clocks_.host_knows(launch->moment);
  };
  const bool is_read = now.deed == Deed::kRead;
  LaunchPtr pending = is_pending(touched.write) ? touched.write : nullptr;
  const Deed deed = pending != nullptr ? Deed::kWrite : Deed::kRead;
  if (pending == nullptr && !is_read) {
    const auto reader = std::find_if(touched.reads.begin(), touched.reads.end(), is_pending);
    if (reader != touched.reads.end()) pending = *reader;
  }
  if (pending == nullptr) return {};
  forget_pinned_use(pending);
  // Report one finding per copy, whatever else of it the host touches.
  allocation->second.shadow.visit_all([&](Cell& cell) {
    if (cell.write == pending) cell.write = nullptr;
    std::erase(cell.reads, pending);
  });
  return {{is_read ? kUnsynchronizedHostRead : kHostWriteDuringCopy, description_of(allocation),
           now, party_of(*pending, deed)}};
}

Description Tracker::description_of(Allocations::iterator allocation) {
  const auto& [address, found] = *allocation;
  if (found.last_tensor.dtype.has_value()) return found.last_tensor;
  const c10::Device device = found.stream ? found.stream->device() : c10::Device(c10::kCPU);
  return {{}, std::nullopt, device, address, found.bytes};
}

void Tracker::note_pinned_use(Allocations::iterator allocation,
                              const std::vector<ByteRange>& ranges, const LaunchPtr& launch,
                              bool is_written) {
  if (!allocation->second.is_pinned || ranges.empty()) return;
  const uintptr_t address = allocation->first;
  const device::HostRange range = {address + ranges.front().begin, address + ranges.back().end,
                                   is_written};
  // A later copy of the same bytes on the same stream replaces the earlier ones, so that a program
  // that never waits does not accumulate them.
  const auto known =
      std::find_if(pinned_uses_.begin(), pinned_uses_.end(), [&](const PinnedUse& use) {
        return use.range == range && use.launch->moment.stream == launch->moment.stream;
      });
  if (known != pinned_uses_.end()) {
    known->launch = launch;
  } else {
    pinned_uses_.push_back({launch, range});
  }
}

void Tracker::forget_pinned_use(const LaunchPtr& launch) {
  std::erase_if(pinned_uses_, [&](const PinnedUse& use) { return use.launch == launch; });
}

std::vector<device::HostRange> Tracker::pinned_memory_in_use() const {
  std::vector<device::HostRange> ranges;
  for (const PinnedUse& use : pinned_uses_) ranges.push_back(use.range);
  return ranges;
}

void Tracker::forget_done_launches() {
  std::erase_if(pinned_uses_,
                [&](const PinnedUse& use) { return clocks_.host_knows(use.launch->moment); });
}

void Tracker::allocated(const void* memory, size_t bytes, c10::Stream stream, Findings& findings) {
  const uint32_t number = clocks_.number_of(stream);
  const uintptr_t address = address_of(memory);
  // Remove older allocations whose free was not observed.
  allocations_.erase(allocations_.lower_bound(address), allocations_.lower_bound(address + bytes));
  allocations_.emplace(address, Allocation{bytes, Shadow(bytes), false, stream});
  const auto waiting = freed_.find(number);
  if (waiting == freed_.end()) return;
  for (const Freed& freed : waiting->second) {
    if (clocks_.is_before(freed.user->moment, number)) continue;
    findings.push_back({kUseAfterFree,
                        freed.tensor,
                        {Deed::kAllocation, "", stream, nullptr},
                        Party{Deed::kFree, "", stream, freed.stack},
                        party_of(*freed.user, freed.is_written ? Deed::kWrite : Deed::kRead)});
  }
  freed_.erase(waiting);
}

std::optional<Tracker::Freed> Tracker::last_user(Allocation& allocation) {
  std::optional<Freed> last;
  if (!allocation.stream.has_value()) return last;
  const uint32_t owner = clocks_.number_of(*allocation.stream);
  const auto& used_on = allocation.used_on;
  const auto consider = [&](const LaunchPtr& launch, bool is_written) {
    const uint32_t stream = launch->moment.stream;
    const bool is_recorded = std::find(used_on.begin(), used_on.end(), stream) != used_on.end();
    if (is_recorded || clocks_.is_before(launch->moment, owner)) return;
    const bool is_later = !last || launch->moment.tick > last->user->moment.tick;
    if (is_later) last = {allocation.last_tensor, launch, is_written, nullptr};
  };
  allocation.shadow.visit_all([&](Cell& cell) {
    if (cell.write != nullptr) consider(cell.write, true);
    for (const LaunchPtr& read : cell.reads) consider(read, false);
  });
  return last;
}

bool Tracker::may_be_in_use(const void* memory) {
  const auto found = allocations_.find(address_of(memory));
  return found != allocations_.end() && last_user(found->second).has_value();
}

void Tracker::freed(const void* memory, Stack stack) {
  const auto found = allocations_.find(address_of(memory));
  if (found == allocations_.end()) return;
  if (auto user = last_user(found->second)) {
    user->stack = std::move(stack);
    freed_[clocks_.number_of(*found->second.stream)].push_back(std::move(*user));
  }
  allocations_.erase(found);
}

void Tracker::written(const void* memory, std::optional<size_t> bytes) {
  const auto found = find(address_of(memory));
  if (found == allocations_.end()) return;
  found->second.shadow.visit({{0, bytes.value_or(found->second.bytes)}},
                             [](Cell& cell) { cell.is_written = true; });
}

void Tracker::used_on(const void* memory, c10::Stream stream) {
  const auto found = find(address_of(memory));
  if (found == allocations_.end()) return;
  std::vector<uint32_t>& used_on = found->second.used_on;
  const uint32_t number = clocks_.number_of(stream);
  if (std::find(used_on.begin(), used_on.end(), number) == used_on.end()) {
    used_on.push_back(number);
  }
}

void Tracker::pinned(const void* memory, size_t bytes) {
  unpinned(memory);
  if (bytes == 0) return;
  allocations_.emplace(address_of(memory), Allocation{bytes, written_shadow(bytes), true});
}

void Tracker::unpinned(const void* memory) {
  const auto allocation = allocations_.find(address_of(memory));
  if (allocation == allocations_.end()) return;
  const auto& [begin, unpinned] = *allocation;
  const uintptr_t end = begin + unpinned.bytes;
  std::erase_if(pinned_uses_, [begin = begin, end](const PinnedUse& use) {
    return begin <= use.range.begin && use.range.begin < end;
  });
  allocations_.erase(allocation);
}

}  // namespace foo::sanitizer
