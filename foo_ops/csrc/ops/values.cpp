#include "ops/values.h"

#include <algorithm>
#include <bit>
#include <sstream>
#include <utility>

#include "launch/kernel_table.h"
#include "launch/overlap.h"

namespace foo {

void check_list(const std::string& name, const Parameter& parameter, at::TensorList tensors) {
  TORCH_CHECK_VALUE(!tensors.empty(), name, ": ", parameter.name,
                    " must have at least one tensor, got none");
  const at::Tensor& first = tensors.front();
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK_TYPE(tensor.scalar_type() == first.scalar_type(), name, ": ", parameter.name,
                     " must have tensors of one dtype, got ", dtype_name(first.scalar_type()),
                     " and ", dtype_name(tensor.scalar_type()));
    TORCH_CHECK_VALUE(tensor.dim() == first.dim(), name, ": ", parameter.name,
                      " must have tensors with the same number of dimensions, got ", first.dim(),
                      " and ", tensor.dim());
  }
}

SharedMemory::SharedMemory(const std::string& name, const std::vector<Parameter>& parameters,
                           c10::ArrayRef<c10::IValue> arguments) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    first_.push_back(members_.size());
    const bool is_written = parameters[i].role != Parameter::Role::kRead;
    for_each_tensor(arguments[i], [&](const at::Tensor& tensor) {
      TORCH_CHECK(!is_written || !overlaps_itself(tensor), name, ": ", parameters[i].name,
                  " is written, so it must not have elements that share memory");
      members_.push_back({tensor, i, is_written});
    });
  }
  std::vector<std::pair<Span, Member*>> sorted;
  for (Member& member : members_) {
    if (has_elements(member.tensor)) sorted.emplace_back(Span(member.tensor), &member);
  }
  std::sort(sorted.begin(), sorted.end(),
            [](const auto& one, const auto& other) { return one.first.begin < other.first.begin; });
  for (auto one = sorted.begin(); one != sorted.end(); ++one) {
    for (auto other = one + 1; other != sorted.end(); ++other) {
      if (other->first.begin >= one->first.end) break;
      compare(name, parameters, *one->second, *other->second);
    }
  }
}

void SharedMemory::compare(const std::string& name, const std::vector<Parameter>& parameters,
                           Member& one, Member& other) {
  if (!one.is_written && !other.is_written) return;
  if (overlap_of(one.tensor, other.tensor) == Overlap::kNone) return;
  TORCH_CHECK(one.argument != other.argument || !one.is_written, name, ": ",
              parameters[one.argument].name,
              " is written, so it must not have tensors that share memory");
  const auto [first, second] = std::minmax(one.argument, other.argument);
  TORCH_CHECK(!one.is_written || !other.is_written, name, ": ", parameters[second].name,
              " must not share memory with ", parameters[first].name, ", since both are written");
  (one.is_written ? one : other).is_shared = true;
}

bool SharedMemory::is_shared(size_t argument, size_t position) const {
  return members_[first_[argument] + position].is_shared;
}

namespace {

constexpr int64_t kOne[] = {1};

// Formats choices as "'a', 'b' or 'c'".
std::string in_words(const std::vector<std::string>& choices) {
  std::ostringstream words;
  for (size_t i = 0; i < choices.size(); ++i) {
    if (i > 0) words << (i + 1 == choices.size() ? " or " : ", ");
    words << '\'' << choices[i] << '\'';
  }
  return words.str();
}

int64_t bits(double number) {
  return std::bit_cast<int64_t>(number);
}

std::vector<int64_t> integers_of(const c10::IValue& list) {
  if (list.isIntList()) return list.toIntVector();
  std::vector<int64_t> integers;
  for (const c10::IValue& number : list.toListRef()) integers.push_back(scalar_bits(number));
  return integers;
}

std::vector<int64_t> bits_of_floats(const c10::IValue& list) {
  std::vector<int64_t> all;
  for (const double number : list.toDoubleVector()) all.push_back(bits(number));
  return all;
}

void check_choice(const std::string& name, const Parameter& parameter, const std::string& text) {
  const auto& choices = parameter.choices;
  TORCH_CHECK_VALUE(std::find(choices.begin(), choices.end(), text) != choices.end(), name, ": ",
                    parameter.name, " must be ", in_words(choices), ", got '", text, "'");
}

void check_number(const std::string& name, const Parameter& parameter, at::ScalarType type,
                  const Common& common) {
  const char* const needed = common.dtype == at::kBool                 ? "a bool"
                             : at::isIntegralType(common.dtype, false) ? "an integer"
                                                                       : "real";
  TORCH_CHECK_TYPE(c10::canCast(type, common.dtype), name, ": ", parameter.name, " must be ",
                   needed, " since the dtype of ", *common.names, " is ", dtype_name(common.dtype),
                   ", got ",
                   at::isComplexType(type)    ? "a complex number"
                   : at::isFloatingType(type) ? "a float"
                                              : "an integer");
}

}  // namespace

void check_value(const std::string& name, const Parameter& parameter, const c10::IValue& argument,
                 const Common& common) {
  using Kind = Parameter::Kind;
  if (parameter.kind == Kind::kText) {
    check_choice(name, parameter, argument.toStringRef());
  } else if (parameter.kind == Kind::kScalar) {
    check_number(name, parameter, argument.toScalar().type(), common);
  } else if (parameter.length >= 0) {
    const auto size = int64_t(argument.toListRef().size());
    TORCH_CHECK_VALUE(size == parameter.length, name, ": ", parameter.name, " must have ",
                      parameter.length, " numbers, got ", size);
  }
}

int64_t Values::hold(const std::string& name, const Parameter& parameter,
                     const c10::IValue& argument, const Common& common) {
  using Kind = Parameter::Kind;
  check_value(name, parameter, argument, common);
  switch (parameter.kind) {
    case Kind::kScalar:
      return add_number(argument.toScalar(), common.dtype);
    case Kind::kText:
      return 0;
    case Kind::kInts:
      return add_list(parameter, integers_of(argument));
    case Kind::kFloats:
      return add_list(parameter, bits_of_floats(argument));
    default:
      return scalar_bits(argument);
  }
}

int64_t Values::add_number(const at::Scalar& number, at::ScalarType dtype) {
  if (at::isComplexType(dtype)) {
    const auto value = number.toComplexDouble();
    complex_.push_front({value.real(), value.imag()});
    return reinterpret_cast<int64_t>(complex_.front().data());
  }
  return at::isFloatingType(dtype) ? bits(number.toDouble()) : number.toLong();
}

int64_t Values::add_list(const Parameter& parameter, std::vector<int64_t> bytes) {
  const auto size = int64_t(bytes.size());
  List& list = lists_.emplace_front(List{std::move(bytes), size, {}, parameter.name});
  list.view = {list.bytes.data(), 1, &list.size, kOne, size, 1, nullptr};
  return reinterpret_cast<int64_t>(&list.view);
}

void Values::sign(const Kernel& kernel, const Parameter& parameter, const c10::IValue& argument,
                  Signature& signature) {
  if (argument.isNone()) {
    signature.push_back(kAbsent);
  } else if (parameter.kind == Parameter::Kind::kText) {
    signature.push_back(kernel.code_of(argument.toStringRef()));
  } else if (parameter.kind == Parameter::Kind::kDtype) {
    signature.push_back(int16_t(argument.toScalarType()));
  } else if (parameter.is_optional) {
    signature.push_back(kGiven);
  }
}

void Values::check_bounds(Outside& outside) {
  for (List& list : lists_) list.view.outside = &outside;
}

const std::string* Values::name_of(const View* view) const {
  for (const List& list : lists_) {
    if (&list.view == view) return &list.name;
  }
  return nullptr;
}

}  // namespace foo
