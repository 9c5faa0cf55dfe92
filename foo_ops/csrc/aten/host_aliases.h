// What takes part in one call on the CPU: storages or tensors of foo, each with its host alias.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <memory>
#include <unordered_map>
#include <utility>

namespace foo::aten {

inline bool is_same(const c10::Storage& one, const c10::Storage& other) {
  return one.is_alias_of(other);
}

inline bool is_same(const at::Tensor& one, const at::Tensor& other) {
  return one.is_same(other);
}

inline const void* identity(const c10::Storage& storage) {
  return storage.unsafeGetStorageImpl();
}

inline const void* identity(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl();
}

// Each object is on one side alone, or on both of one pair.
template <class Value>
class HostAliases {
 public:
  // The other side of a pair, or null. It stays where it is until the next add.
  const Value* host_of(const Value& foo) const { return find(foo, &Pair::foo, &Pair::host); }
  const Value* foo_of(const Value& host) const { return find(host, &Pair::host, &Pair::foo); }

  void add(const Value& foo, const Value& host) {
    pairs_.push_back({foo, host});
    if (pairs_.size() < kMany) return;
    if (positions_ == nullptr) positions_ = std::make_unique<Positions>();
    for (; indexed_ < pairs_.size(); ++indexed_) {
      positions_->try_emplace(identity(pairs_[indexed_].foo), indexed_);
      positions_->try_emplace(identity(pairs_[indexed_].host), indexed_);
    }
  }

  auto begin() const { return pairs_.begin(); }
  auto end() const { return pairs_.end(); }

 private:
  struct Pair {
    Value foo;
    Value host;
  };
  using Positions = std::unordered_map<const void*, size_t>;

  // Most calls have few tensors, and a walk costs less than a hash. Lists of thousands exist, too.
  static constexpr size_t kMany = 16;

  const Value* find(const Value& key, Value Pair::* side, Value Pair::* other) const {
    if (positions_ != nullptr) {
      const auto position = positions_->find(identity(key));
      return position == positions_->end() ? nullptr : &(pairs_[position->second].*other);
    }
    for (const Pair& pair : pairs_) {
      if (is_same(pair.*side, key)) return &(pair.*other);
    }
    return nullptr;
  }

  c10::SmallVector<Pair, 4> pairs_;
  std::unique_ptr<Positions> positions_;
  size_t indexed_ = 0;
};

}  // namespace foo::aten
