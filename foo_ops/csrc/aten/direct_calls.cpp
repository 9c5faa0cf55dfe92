// Operators that training calls most often: the CPU's kernels on the tensors of foo as they are.
//
// The fallback makes a host alias of each tensor, about a microsecond for a call. What is here runs
// only where nothing has to be converted and all tensors are on one device; the rest, errors too,
// is left to the fallback.

#include <ATen/ops/add_native.h>
#include <ATen/ops/mul_native.h>
#include <ATen/ops/native_layer_norm_backward_native.h>
#include <ATen/ops/native_layer_norm_native.h>

#include <cstring>
#include <tuple>

#include "aten/factories.h"
#include "aten/fallback.h"
#include "aten/operator_counts.h"
#include "registration.h"

namespace foo::aten {
namespace {

using at::IntArrayRef;
using at::Scalar;
using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Larger tensors are worth several threads.
constexpr size_t kLargestMemset = size_t{1} << 17;

// A structured kernel of torch, made of TensorIterator. It chooses the loop by the device of the
// first operand: this says CPU, once the result is there.
template <class Structured>
struct OnCpuLoop : Structured {
  template <class... Arguments>
  void run(const Arguments&... arguments) {
    this->meta(arguments...);
    this->operands_[0].device = c10::kCPU;
    this->impl(arguments..., this->maybe_get_output());
  }
  using Structured::maybe_get_output;
};

template <class Structured>
struct WithNewResult final : OnCpuLoop<Structured> {
  void set_output_raw_strided(int64_t index, IntArrayRef sizes, IntArrayRef strides,
                              at::TensorOptions options) override {
    result = new_tensor(sizes, strides, options);
    Structured::set_output_raw_strided(index, sizes, strides, options);
  }
  const Tensor& maybe_get_output(int64_t) override { return result; }

  Tensor result;
};

template <class Structured>
struct WithResult final : OnCpuLoop<Structured> {
  explicit WithResult(const Tensor& argument) : result(argument) {}
  const Tensor& maybe_get_output(int64_t) override { return result; }

  const Tensor& result;
};

template <class Structured, class... Arguments>
Tensor with_new_result(Arguments... arguments) {
  WithNewResult<Structured> kernel;
  kernel.run(arguments...);
  return std::move(kernel.result);
}

template <class Structured, class... Others>
Tensor& in_place(Tensor& self, Others... others) {
  WithResult<Structured>(self).run(self, others...);
  return self;
}

Tensor& zero_memory(Tensor& self) {
  if (self.numel() > 0) std::memset(self.mutable_data_ptr(), 0, self.nbytes());
  return self;
}

constexpr auto is_dense_memory = [](const Tensor& self) {
  return self.is_non_overlapping_and_dense() && self.nbytes() <= kLargestMemset;
};

// The loops of the CPU convert nothing, and on foo TensorIterator does not either.
constexpr auto are_alike = [](const Tensor& self, const Tensor& other, const auto&...) {
  return self.scalar_type() == other.scalar_type() && self.device() == other.device();
};

struct IsOn {
  c10::Device device;
  bool operator()(const Tensor& tensor) const {
    return !tensor.defined() || tensor.device() == device;
  }
  bool operator()(const OptionalTensor& tensor) const {
    return !tensor.has_value() || (*this)(*tensor);
  }
  template <class Other>
  bool operator()(const Other&) const {
    return true;
  }
};

constexpr auto are_on_one_device = [](const Tensor& first, const auto&... others) {
  const IsOn is_on{first.device()};
  return (is_on(others) && ...);
};

// The direct call where the arguments allow it, else the fallback.
template <Name name, auto direct, auto is_possible>
struct DirectCall;

template <Name name, class Result, class... Arguments, Result (*direct)(Arguments...),
          auto is_possible>
struct DirectCall<name, direct, is_possible> {
  static Result call(Arguments... arguments) {
    if (is_possible(arguments...)) return Counted<name, direct>::call(arguments...);
    static const auto op = find_operator(name.text);
    torch::jit::Stack stack;
    torch::jit::push(stack, arguments...);
    call_on_host(op, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), &stack);
    if constexpr (std::is_same_v<Result, Tensor&>) {
      return std::get<0>(std::tie(arguments...));
    } else if constexpr (std::is_same_v<Result, Tensor>) {
      return stack[0].toTensor();
    } else {
      return {stack[0].toTensor(), stack[1].toTensor(), stack[2].toTensor()};
    }
  }
};

template <Name name, auto direct, auto is_possible>
void register_direct_call(torch::Library& library) {
  library.impl(name.text, &DirectCall<name, direct, is_possible>::call);
}

using Add = at::native::structured_ufunc_add_CPU;
using Multiply = at::native::structured_mul_out;

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  register_direct_call<"aten::add.Tensor",
                       &with_new_result<Add, const Tensor&, const Tensor&, const Scalar&>,
                       are_alike>(library);
  register_direct_call<"aten::add_.Tensor", &in_place<Add, const Tensor&, const Scalar&>,
                       are_alike>(library);
  register_direct_call<"aten::mul.Tensor", &with_new_result<Multiply, const Tensor&, const Tensor&>,
                       are_alike>(library);
  register_direct_call<"aten::mul_.Tensor", &in_place<Multiply, const Tensor&>, are_alike>(library);
  register_direct_call<"aten::native_layer_norm", &at::native::layer_norm_cpu, are_on_one_device>(
      library);
  register_direct_call<"aten::native_layer_norm_backward", &at::native::layer_norm_backward_cpu,
                       are_on_one_device>(library);
  register_direct_call<"aten::zero_", &zero_memory, is_dense_memory>(library);
}

}  // namespace foo::aten
