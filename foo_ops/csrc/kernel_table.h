// Where launchers find the compiled Numba kernels.

#pragma once

#include <c10/core/ScalarType.h>

#include <array>
#include <atomic>
#include <string>

namespace foo {

// Name of a dtype as Python writes it: float32, bfloat16, complex64 ...
std::string dtype_name(at::ScalarType dtype);

// Compiles a kernel for a dtype or loads it from the disk cache, and returns its address. Called
// without the GIL; throws what the compilation raised.
using Resolver = void* (*)(const std::string& kernel, const std::string& dtype);
void set_resolver(Resolver resolver);

// A kernel with one function pointer a dtype, each resolved at its first use. An instance lives as
// long as the process.
class Kernel {
 public:
  explicit Kernel(std::string name) : name_(std::move(name)) {}

  // The kernel's C function for a dtype. Call it before at::parallel_for, not inside: the first
  // call for a dtype takes the GIL.
  template <class Function>
  Function* get(at::ScalarType dtype) {
    void* address = addresses_[static_cast<size_t>(dtype)].load(std::memory_order_acquire);
    if (address == nullptr) [[unlikely]] {
      address = resolve(dtype);
    }
    return reinterpret_cast<Function*>(address);
  }

 private:
  void* resolve(at::ScalarType dtype);

  std::string name_;
  std::array<std::atomic<void*>, static_cast<size_t>(at::ScalarType::NumOptions)> addresses_{};
};

}  // namespace foo
