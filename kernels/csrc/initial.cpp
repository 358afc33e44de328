#include "initial.h"

#include <algorithm>
#include <cstring>

#include "dispatch.h"
#include "hashing.h"

namespace shardam {
namespace {

constexpr int kIntervalBits = 6;
constexpr std::uint32_t kPairsPerSign = 2048;

SHARDAM_CLONES void write_uniform(float a, float b, std::uint64_t key, std::int64_t dim, float* out) {
  for (std::int64_t column = 0; column < dim; ++column) {
    const auto signed_hash = static_cast<std::int32_t>(element_hash(key, column));
    out[column] = a + b * static_cast<float>(signed_hash >> 8);
  }
}

// 2^-shift, exactly.
SHARDAM_INLINE float negative_power(int shift) {
  const std::uint32_t bits = static_cast<std::uint32_t>(127 - shift) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return power;
}

SHARDAM_CLONES void write_normal(const float* a, const float* b, std::uint64_t key, std::int64_t dim, float* out) {
  for (std::int64_t column = 0; column < dim; ++column) {
    const std::uint32_t hash = element_hash(key, column);
    const std::uint32_t u = hash & 0x7fffffffu;
    const int leading = 31 - __builtin_clz(u | 1);  // position of the leading one
    const int right = std::max(leading - kIntervalBits, 0), left = std::max(kIntervalBits - leading, 0);
    const std::uint32_t next_bits = ((u >> right) << left) & ((1u << kIntervalBits) - 1);
    const std::uint32_t interval = u == 0 ? 0 : (static_cast<std::uint32_t>(leading + 1) << kIntervalBits) + next_bits;
    const std::uint32_t pair = (hash >> 31) * kPairsPerSign + interval;
    const float frac = static_cast<float>(u & ((1u << right) - 1)) * negative_power(right);  // exact: up to 24 bits
    out[column] = a[pair] + b[pair] * frac;
  }
}

}  // namespace

void write_initial_row(const InitialRows& initial, std::int64_t row_id, std::int64_t dim, float* out) {
  if (initial.padding_idx == row_id) {
    std::fill(out, out + dim, 0.0f);
    return;
  }
  const std::uint64_t key = row_key(initial.table_seed, row_id);  // mix64(t) is 0 at t = 0
  switch (initial.kind) {
    case InitKind::kConstant:
      std::fill(out, out + dim, initial.a[0]);
      break;
    case InitKind::kUniform:
      write_uniform(initial.a[0], initial.b[0], key, dim, out);
      break;
    case InitKind::kNormal:
      write_normal(initial.a, initial.b, key, dim, out);
      break;
  }
}

}  // namespace shardam
