// The table in which launchers find the compiled Numba kernels.

#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <string>
#include <vector>

namespace foo {

// Returns the name of a dtype as Python writes it: float32, bfloat16, complex64 ...
std::string dtype_name(at::ScalarType dtype);

// The argument types that a kernel is compiled for, a number for each argument that matters: a
// tensor's dtype, optionally followed by its number of dimensions; whether an optional argument is
// given; which text. The last number may say that the kernel checks its accesses.
using Signature = c10::SmallVector<int16_t, 24>;
constexpr int16_t kAbsent = -1;
constexpr int16_t kGiven = -2;
constexpr int16_t kChecked = -3;
// Code of 0 dimensions; each dimension subtracts one.
constexpr int16_t kRankZero = -4;
// Code of a kernel's first text; codes of dtypes are smaller.
constexpr int16_t kFirstText = 1000;
// Codes as the resolver gets them.
inline constexpr const char* kAbsentCode = "none";
inline constexpr const char* kGivenCode = "given";
inline constexpr const char* kCheckedCode = "checked";

// Compiles a kernel for a signature or loads it from the disk cache, and returns its address. The
// signature is written as "float32-2d,none,given,'same',checked". Called without the GIL; throws
// what the compilation raised.
using Resolver = void* (*)(const std::string& kernel, const std::string& signature);
void set_resolver(Resolver resolver);

// Under FOO_INTERPRET=1, where Python interprets users' kernels, the rethrower is called after each
// kernel, in the same thread, and throws what the kernel raised.
using Rethrower = void (*)();
void set_rethrower(Rethrower rethrower);

// Called when all ranges of a user's kernel are done. A compiled kernel raises nothing.
void rethrow_raised();

// Minimum steps of a user's kernel per thread: all of them under FOO_INTERPRET=1, so that debuggers
// find the kernel in the calling thread.
int64_t grain_size(int64_t of_compiled);

// A kernel with a function pointer for each signature, resolved at its first use. Instances live as
// long as the process.
class Kernel {
 public:
  // `texts` are the texts that signatures may contain.
  explicit Kernel(std::string name, std::vector<std::string> texts = {})
      : name_(std::move(name)), texts_(std::move(texts)) {}
  Kernel(const Kernel&) = delete;

  // Returns the code of a text in signatures.
  int16_t code_of(const std::string& text) const;

  // Returns the kernel's C function. Call this before at::parallel_for, not inside: the first call
  // for a signature takes the GIL.
  template <class Function>
  Function* get(const Signature& signature) {
    // Linear search: a process uses a kernel with very few signatures.
    for (const Entry* entry = first_.load(std::memory_order_acquire); entry != nullptr;
         entry = entry->next) {
      if (entry->signature == signature) return reinterpret_cast<Function*>(entry->address);
    }
    return reinterpret_cast<Function*>(resolve(signature));
  }

  template <class Function>
  Function* get(at::ScalarType dtype) {
    return get<Function>(Signature{static_cast<int16_t>(dtype)});
  }

 private:
  struct Entry {
    Signature signature;
    void* address;
    const Entry* next;
  };

  void* resolve(const Signature& signature);
  std::string written(const Signature& signature) const;

  std::string name_;
  std::vector<std::string> texts_;
  // Entries are added in front and never removed.
  std::atomic<const Entry*> first_ = nullptr;
};

}  // namespace foo
