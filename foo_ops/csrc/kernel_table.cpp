#include "kernel_table.h"

#include <c10/util/Exception.h>

namespace foo {

namespace {

Resolver resolver = nullptr;

}  // namespace

std::string dtype_name(at::ScalarType dtype) {
  return std::string(c10::getDtypeNames(dtype).first);
}

void set_resolver(Resolver new_resolver) {
  resolver = new_resolver;
}

void* Kernel::resolve(at::ScalarType dtype) {
  TORCH_INTERNAL_ASSERT(resolver != nullptr, "no resolver is set for kernel ", name_);
  void* address = resolver(name_, dtype_name(dtype));
  addresses_[static_cast<size_t>(dtype)].store(address, std::memory_order_release);
  return address;
}

}  // namespace foo
