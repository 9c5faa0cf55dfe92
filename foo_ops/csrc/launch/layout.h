// Descriptions of structs and function signatures as text, which a test compares with Python's
// kernels.

#pragma once

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

}  // namespace foo
