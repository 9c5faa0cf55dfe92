#include "ops/linear/product_table.h"

#include <algorithm>
#include <initializer_list>
#include <limits>

namespace foo {

namespace {

template <class Member>
constexpr unsigned set_of(std::initializer_list<Member> members) {
  unsigned result = 0;
  for (const Member member : members) result |= 1U << static_cast<unsigned>(member);
  return result;
}

template <class Member>
constexpr bool is_in(unsigned set, Member member) {
  return (set >> static_cast<unsigned>(member) & 1U) != 0;
}

constexpr int64_t kAny = std::numeric_limits<int64_t>::max();

struct Rule {
  unsigned families, dtypes, forms;
  int64_t least_rows, most_rows = kAny;
  // With less work, what PyTorch does around a product takes too long.
  double least_work = 1 << 22;
  int64_t most_threads = kAny;
};

constexpr unsigned kAmdAvx2 = set_of({Family::kAmdAvx2});
constexpr unsigned kAmdBFloat16 = set_of({Family::kAmdBFloat16});
constexpr unsigned kIntel = set_of(
    {Family::kIntelAvx2, Family::kIntelAvx512, Family::kIntelBFloat16, Family::kIntelMatrixUnit});
constexpr unsigned kIntelMatrixUnit = set_of({Family::kIntelMatrixUnit});

constexpr unsigned kFloat32 = set_of({at::kFloat});
constexpr unsigned kFloat64 = set_of({at::kDouble});
constexpr unsigned kFloat32And64 = set_of({at::kFloat, at::kDouble});
constexpr unsigned kBFloat16 = set_of({at::kBFloat16});

constexpr unsigned kForward = set_of({Form::kForward});
constexpr unsigned kBias = set_of({Form::kBias});
constexpr unsigned kGradInput = set_of({Form::kGradInput});
constexpr unsigned kGradWeight = set_of({Form::kGradWeight});
constexpr unsigned kAll = set_of({Form::kForward, Form::kBias, Form::kActivation, Form::kGate,
                                  Form::kGradInput, Form::kGradWeight});

// bfloat16 on AMD's processors with AVX512-BF16, where oneDNN reaches 0.85 to 0.95 of their peak.
// The speed of ours beside it on a Zen 5, one thread, layers of 512 x 512, 2816 x 1024 and
// 1024 x 2816:
//
//   rows               16            32            64           128          1024
//   forward       1.04 - 1.45   1.08 - 1.44   1.03 - 1.15   0.98 - 1.00   0.89 - 0.98
//   grad_input    0.74 - 1.00   0.84 - 0.98   0.85 - 0.99   0.94 - 0.99   0.85 - 1.01
//   grad_weight   0.34 - 0.50   0.35 - 0.68   0.52 - 0.78   0.63 - 0.83   0.92 - 0.99
//
// Forward, 9, 12 and 24 rows of 1024 x 2816 are at 0.74 to 0.89, of 512 x 512 at 1.15 to 1.26; 9
// and 24 rows on two threads at 0.64 to 0.90, 16 at 0.99 to 1.20. With a bias:
//
//   rows               16            64           128           256          1024
//   forward       1.05 - 1.59   1.01 - 1.18   0.99 - 1.04   0.95 - 0.97   0.93 - 1.04
//
// Our float32 is 1.4 to 2.4 times as fast as PyTorch's there.
constexpr std::array kAmdBFloat16Rules = {
    Rule{kAmdBFloat16, kBFloat16, kForward | kBias, 9, 15, 1 << 23},
    Rule{kAmdBFloat16, kBFloat16, kForward | kBias, 17, 31, 1 << 23},
    Rule{kAmdBFloat16, kBFloat16, kForward, 128},
    Rule{kAmdBFloat16, kBFloat16, kBias, 256},
    Rule{kAmdBFloat16, kBFloat16, kGradInput | kGradWeight, 9},
};

// float32 and float64 on AMD's processors with AVX2 alone, by MKL. The speed beside PyTorch's of
// ours and of blocks that MKL computes, on a Zen 3 with a neighbour, one thread and two, layers of
// 512 x 512, 1024 x 1024, 2816 x 1024 and 1024 x 2816:
//
//                 rows         float32: ours    in blocks     float64: ours    in blocks
//   forward       256            0.90 - 1.25   0.97 - 1.18      0.78 - 1.00   0.84 - 1.03
//   forward       1024           0.86 - 1.11   0.95 - 1.12      0.78 - 0.99   0.83 - 1.16
//   grad_input    256            0.84 - 1.13   0.94 - 1.20      0.85 - 1.00   0.84 - 0.99
//   grad_input    1024           0.82 - 1.02   0.90 - 1.20      0.73 - 1.02   0.78 - 1.18
//   grad_weight   512 - 2048     0.81 - 1.17   0.83 - 1.12      0.77 - 1.23   0.71 - 1.18
//
// For grad_weight the means are 0.91 and 0.95, and both 0.9 in float64. With 256 rows ours in
// float32 is at 0.94 - 1.24. With a bias, blocks of float32 are at 0.93 - 1.19.
constexpr std::array kAmdAvx2Rules = {
    Rule{kAmdAvx2, kFloat32And64, kForward | kBias | kGradInput, 256},
    Rule{kAmdAvx2, kFloat32, kGradWeight, 512},
};

// float32 and float64 on Intel's processors, by MKL. There is one measurement of ours beside it for
// each of two of them, layers of 2816 x 1024:
//
//   rows                                        64            1024
//   Cascade Lake (AVX-512), 2 threads          0.88           0.72
//   Emerald Rapids, 1 thread                   0.93           0.93
//   Emerald Rapids, 2 threads                  0.99           0.87
//
// All else is derived from a Zen 5 whose MKL has its kernels for Intel's AVX-512, one thread, the
// layers above. Ours beside these, and blocks of theirs:
//
//                 rows         float32: ours    in blocks     float64: ours    in blocks
//   forward       16             1.32 - 1.58   0.94 - 1.08      0.85 - 2.43   0.97 - 1.01
//   forward       64             1.09 - 1.31   0.93 - 1.02      0.83 - 1.51   0.99 - 1.00
//   forward       1024           0.86 - 0.94   0.91 - 0.97      0.74 - 0.84   0.96 - 0.97
//   grad_input    16             0.41 - 0.53   0.86 - 0.96      0.47 - 0.61   0.93 - 0.97
//   grad_input    64             0.63 - 0.82   0.92 - 1.02      0.62 - 0.82   0.98 - 1.04
//   grad_input    1024           0.82 - 0.91   0.92 - 0.96      0.74 - 0.79   0.92 - 0.99
//   grad_weight   16             0.55 - 0.91   0.79 - 0.98      0.61 - 0.62   0.89 - 1.05
//   grad_weight   256            0.69 - 0.89   0.90 - 0.98      0.64 - 0.80   0.93 - 0.95
//   grad_weight   1024           0.80 - 0.94   0.90 - 0.95      0.70 - 0.92   0.90 - 0.98
//
// With a bias, a gelu or as a gate, blocks are at 0.88 - 1.12. What they lose is the packing of
// matrices, beside which a core of a Cascade Lake multiplies at a third of that Zen 5's rate.
// With both held to AVX2, ours is at 0.31 - 1.37 and blocks at 0.80 - 1.10.
//
// Forward in float64, what MKL returns for less rows depends on how many threads there are, even
// for a block on one of them.
//
// bfloat16 on a matrix unit: one thread of an Emerald Rapids has ours at 0.84 of oneDNN's speed for
// 1024 rows and at 1.19 for 64, 2 to 16 threads at 1.17 to 2.48. Both sum up in one order: of 2.9
// million results none differs. On vectors ours is 1.6 to 3.8 times as fast.
constexpr std::array kIntelRules = {
    Rule{kIntel, kFloat32, kAll, 9, kAny, 1 << 21},
    Rule{kIntel, kFloat64, kAll, 256, kAny, 1 << 21},
    Rule{kIntel, kFloat64, kGradInput | kGradWeight, 9, kAny, 1 << 21},
    Rule{kIntelMatrixUnit, kBFloat16, kForward | kBias, 512, kAny, 1 << 22, 1},
};

}  // namespace

Family family_of(const Processor& processor) {
  if (processor.vendor == Vendor::kIntel) {
    if (processor.has_matrix_unit) return Family::kIntelMatrixUnit;
    if (processor.has_bfloat16_dot) return Family::kIntelBFloat16;
    if (processor.has_avx512) return Family::kIntelAvx512;
    if (processor.has_avx2) return Family::kIntelAvx2;
  }
  if (processor.vendor == Vendor::kAmd) {
    if (processor.has_bfloat16_dot) return Family::kAmdBFloat16;
    if (processor.has_avx2 && !processor.has_avx512) return Family::kAmdAvx2;
  }
  return Family::kNone;
}

std::optional<Family> family_of_name(std::string_view name) {
  const auto* const found = std::find(kFamilyNames.begin(), kFamilyNames.end(), name);
  if (found == kFamilyNames.end()) return std::nullopt;
  return static_cast<Family>(found - kFamilyNames.begin());
}

std::string_view name_of(Family family) {
  return kFamilyNames[static_cast<size_t>(family)];
}

bool is_quicker_by_torch(Family family, at::ScalarType dtype, Form form, const ProductSize& size) {
  const auto has = [&](const auto& rules) {
    return std::any_of(rules.begin(), rules.end(), [&](const Rule& rule) {
      return is_in(rule.families, family) && is_in(rule.dtypes, dtype) && is_in(rule.forms, form) &&
             rule.least_rows <= size.rows && size.rows <= rule.most_rows &&
             rule.least_work <= size.work && size.threads <= rule.most_threads;
    });
  };
  return has(kAmdBFloat16Rules) || has(kAmdAvx2Rules) || has(kIntelRules);
}

}  // namespace foo
