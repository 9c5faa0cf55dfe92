// The participants of one call on the CPU: storages or tensors of foo, each with its host alias.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>
#include <c10/util/flat_hash_map.h>

#include <memory>
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

template <class Value>
class HostAliases {
 public:
  // The other side of a pair, or null. It stays where it is until the next add.
  const Value* host_of(const Value& foo) { return find(foo, &Pair::foo, &Pair::host, foo_index_); }
  const Value* foo_of(const Value& host) {
    return find(host, &Pair::host, &Pair::foo, host_index_);
  }

  void add(const Value& foo, const Value& host) { pairs_.push_back({foo, host}); }

  auto begin() const { return pairs_.begin(); }
  auto end() const { return pairs_.end(); }

 private:
  struct Pair {
    Value foo;
    Value host;
  };

  // Where the first pairs are, by one of their sides.
  struct Index {
    ska::flat_hash_map<const void*, size_t> positions;
    size_t size = 0;
  };

  // Most calls have few tensors, and a walk costs less than a hash. Lists of thousands exist, too.
  static constexpr size_t kMany = 16;

  const Value* find(const Value& key, Value Pair::* side, Value Pair::* other,
                    std::unique_ptr<Index>& index) {
    if (pairs_.size() >= kMany) return find_by_index(key, side, other, index);
    for (const Pair& pair : pairs_) {
      if (is_same(pair.*side, key)) return &(pair.*other);
    }
    return nullptr;
  }

  const Value* find_by_index(const Value& key, Value Pair::* side, Value Pair::* other,
                             std::unique_ptr<Index>& index) {
    if (index == nullptr) index = std::make_unique<Index>();
    for (; index->size < pairs_.size(); ++index->size) {
      index->positions.emplace(identity(pairs_[index->size].*side), index->size);
    }
    const auto position = index->positions.find(identity(key));
    return position == index->positions.end() ? nullptr : &(pairs_[position->second].*other);
  }

  c10::SmallVector<Pair, 4> pairs_;
  std::unique_ptr<Index> foo_index_;
  std::unique_ptr<Index> host_index_;
};

}  // namespace foo::aten
