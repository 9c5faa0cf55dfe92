// What linear layers ask of their arguments. The checks read only metadata, and raise.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

namespace foo {

void check_dtype(const char* name, const char* argument, const at::Tensor& tensor);
void check_rows(const char* name, const char* argument, const at::Tensor& tensor);
void check_dimensions(const char* name, const char* argument, const at::Tensor& tensor,
                      int64_t dimensions, const char* shape);
void check_like(const char* name, const char* argument, const at::Tensor& tensor, const char* of,
                const at::Tensor& like);
void check_count(const char* name, const char* argument, const char* what, const c10::SymInt& size,
                 const c10::SymInt& expected, const char* as);

}  // namespace foo
