// The table in which launchers find the compiled Numba kernels, and descriptions of what these
// take: structs and function signatures as text, which a test compares with Python's kernels.

#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

namespace foo {

// Specialised next to each struct that kernels read, with its name and fields.
template <class Struct>
struct Layout;

// Returns the name of a type: a dtype's, "int64*" for a pointer, "int64[4]" for an array, or a
// struct's.
template <class Type>
std::string type_name() {
  using Unqualified = std::remove_const_t<Type>;
  if constexpr (std::is_pointer_v<Unqualified>) {
    return type_name<std::remove_pointer_t<Unqualified>>() + "*";
  } else if constexpr (std::is_array_v<Unqualified>) {
    return type_name<std::remove_extent_t<Unqualified>>() + "[" +
           std::to_string(std::extent_v<Unqualified>) + "]";
  } else if constexpr (std::is_void_v<Unqualified>) {
    return "void";
  } else if constexpr (std::is_integral_v<Unqualified>) {
    return "int" + std::to_string(8 * sizeof(Unqualified));
  } else if constexpr (std::is_floating_point_v<Unqualified>) {
    return "float" + std::to_string(8 * sizeof(Unqualified));
  } else {
    return Layout<Unqualified>::name;
  }
}

struct Field {
  const char* name;
  std::string (*type)();
  size_t offset, size;
};

// Lists all fields of the type named Struct in this scope: FOO_FIELDS(first, second ...).
#define FOO_FIELDS(...) {FOO_EXPAND(FOO_NEXT_FIELD(__VA_ARGS__))}
#define FOO_NEXT_FIELD(field, ...)                                                      \
  foo::Field{#field, &foo::type_name<decltype(Struct::field)>, offsetof(Struct, field), \
             sizeof(Struct::field)} __VA_OPT__(, FOO_AGAIN FOO_PARENTHESES(__VA_ARGS__))
#define FOO_AGAIN() FOO_NEXT_FIELD
#define FOO_PARENTHESES ()
// Each pass over the text expands a macro once: these are enough passes for 80 fields.
#define FOO_EXPAND(...) FOO_EXPAND1(FOO_EXPAND1(FOO_EXPAND1(FOO_EXPAND1(__VA_ARGS__))))
#define FOO_EXPAND1(...) FOO_EXPAND2(FOO_EXPAND2(FOO_EXPAND2(FOO_EXPAND2(__VA_ARGS__))))
#define FOO_EXPAND2(...) FOO_EXPAND3(FOO_EXPAND3(FOO_EXPAND3(FOO_EXPAND3(__VA_ARGS__))))
#define FOO_EXPAND3(...) __VA_ARGS__

// Whether each field begins where the previous one ends: no field is missing or out of order.
template <class Struct>
constexpr bool is_whole() {
  size_t stop = 0;
  for (const Field& field : Layout<Struct>::fields) {
    if (field.offset != stop) return false;
    stop += field.size;
  }
  return stop == sizeof(Struct);
}

// Names the types of a function's arguments.
template <class Function>
struct Arguments;

template <class Result, class... Types>
struct Arguments<Result(Types...)> {
  static std::vector<std::string> names() { return {type_name<Types>()...}; }
};

// The table finds kernels by their names and signatures.

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
