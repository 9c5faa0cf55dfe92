#include "launch/kernel_table.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>

namespace foo {

namespace {

Resolver resolver = nullptr;
Rethrower rethrower = nullptr;

std::string written(int16_t code) {
  switch (code) {
    case kAbsent:
      return kAbsentCode;
    case kGiven:
      return kGivenCode;
    case kChecked:
      return kCheckedCode;
    default:
      return dtype_name(static_cast<at::ScalarType>(code));
  }
}

}  // namespace

std::string dtype_name(at::ScalarType dtype) {
  return std::string(c10::getDtypeNames(dtype).first);
}

void set_resolver(Resolver new_resolver) {
  resolver = new_resolver;
}

void set_rethrower(Rethrower new_rethrower) {
  rethrower = new_rethrower;
}

void rethrow_raised() {
  if (rethrower != nullptr) rethrower();
}

int64_t grain_size(int64_t of_compiled) {
  return rethrower != nullptr ? std::numeric_limits<int64_t>::max() : of_compiled;
}

int16_t Kernel::code_of(const std::string& text) const {
  return int16_t(kFirstText + (std::find(texts_.begin(), texts_.end(), text) - texts_.begin()));
}

std::string Kernel::written(const Signature& signature) const {
  std::string result;
  for (const int16_t code : signature) {
    if (code <= kRankZero) {
      result += '-' + std::to_string(kRankZero - code) + 'd';
      continue;
    }
    if (!result.empty()) result += ',';
    result += code >= kFirstText ? '\'' + texts_.at(code - kFirstText) + '\'' : foo::written(code);
  }
  return result;
}

void* Kernel::resolve(const Signature& signature) {
  TORCH_INTERNAL_ASSERT(resolver != nullptr, "no resolver is set for kernel ", name_);
  void* address = resolver(name_, written(signature));
  auto* entry = new Entry{signature, address, first_.load(std::memory_order_relaxed)};
  while (!first_.compare_exchange_weak(entry->next, entry, std::memory_order_release)) {
  }
  return address;
}

}  // namespace foo
