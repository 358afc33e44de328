#include "adam.h"

#include <algorithm>
#include <atomic>
#include <cfloat>
#include <cmath>
#include <type_traits>

#include "dispatch.h"
#include "parallel.h"

namespace shardam {
namespace {

constexpr float kDecayedGradientLimit = 18446742974197923840.0f;  // 2^64 - 2^40, the float below 2^64
constexpr std::uint32_t kInfinityBits = 0x7f800000u;
constexpr std::int64_t kAhead = 3072;        // bytes of records that are prefetched, about what a core keeps in flight ...
constexpr std::int64_t kMaxAheadRows = 16;   // ... but no more rows
constexpr std::int64_t kLineBytes = 64;
constexpr std::int64_t kLineFloats = kLineBytes / sizeof(float);
constexpr std::int64_t kMaxPrefetchBytes = 4096;  // of one record; longer ones the hardware's own prefetch follows
constexpr std::int64_t kColumns = 512;  // of a row at a time: what is made of them before they are stored stays in L1
constexpr std::int64_t kLeastBytes = 1 << 15;  // of records, of a part: to update them takes about as long as waking a thread

enum class Decay { kNone, kCoupled, kDecoupled };

// The rows of one part.
struct Rows {
  const AdamJob& job;
  std::int64_t first;
  std::int64_t end;
};

SHARDAM_INLINE float clamp(float value, float limit) {
  const float upper = value < limit ? value : limit;
  return upper > -limit ? upper : -limit;
}

// One row. Returns the largest magnitude among the new weights, as bits.
template <bool kMaximize, Decay kDecay, bool kMoveWeight>
SHARDAM_INLINE std::uint32_t update_row(const AdamFactors& factors, float s, std::int64_t dim, const float* __restrict gradient,
                                        float* __restrict weight, float* __restrict exp_avg, float* __restrict exp_avg_sq) {
  std::uint32_t peak = 0;
  for (std::int64_t j = 0; j < dim; ++j) {
    float g = kMaximize ? -gradient[j] : gradient[j];
    float w = weight[j];
    if (kDecay == Decay::kCoupled) g = clamp(g + factors.weight_decay * w, kDecayedGradientLimit);
    if (kDecay == Decay::kDecoupled) w = clamp(w * factors.d, FLT_MAX);
    const float m = exp_avg[j] + (g - exp_avg[j]) * factors.c1;
    const float v = exp_avg_sq[j] + (g * g - exp_avg_sq[j]) * factors.c2;
    exp_avg[j] = m;
    exp_avg_sq[j] = v;
    if (kMoveWeight) w = w - s * (m / (std::sqrt(v) + factors.eps));
    weight[j] = w;
    peak = std::max(peak, float_bits(w) & 0x7fffffffu);
  }
  return peak;
}

// Brings infinite weights back to the largest finite ones; returns how many there were.
std::int64_t saturate(float* weight, std::int64_t dim) {
  std::int64_t saturated = 0;
  for (std::int64_t j = 0; j < dim; ++j) {
    if (!std::isinf(weight[j])) continue;
    weight[j] = std::copysign(FLT_MAX, weight[j]);
    ++saturated;
  }
  return saturated;
}

SHARDAM_INLINE void prefetch_record(const std::byte* record, std::int64_t stride_bytes) {
  const std::int64_t size = std::min(stride_bytes, kMaxPrefetchBytes);
  for (std::int64_t at = 0; at < size; at += kLineBytes) __builtin_prefetch(record + at, 1);
}

// One row whose weight is float32, in place. Returns how many weights were saturated.
template <bool kMaximize, Decay kDecay>
SHARDAM_INLINE std::int64_t update_float32(const AdamFactors& factors, float s, std::int64_t dim, const float* gradient,
                                           float* weight, float* exp_avg, float* exp_avg_sq) {
  // s = 0 (a warm-up's lr) leaves the weight as it is, also where the quotient is infinite and 0 * inf would be NaN.
  const std::uint32_t peak =
      s == 0.0f ? update_row<kMaximize, kDecay, false>(factors, s, dim, gradient, weight, exp_avg, exp_avg_sq)
                : update_row<kMaximize, kDecay, true>(factors, s, dim, gradient, weight, exp_avg, exp_avg_sq);
  return peak >= kInfinityBits ? saturate(weight, dim) : 0;
}

// The same for a weight below float32: widened, updated and rounded.
template <class Weight, bool kMaximize, Decay kDecay>
SHARDAM_INLINE std::int64_t update_narrow(const AdamFactors& factors, float s, std::int64_t dim, const float* gradient,
                                          std::uint16_t* bits, float* exp_avg, float* exp_avg_sq, std::uint64_t stream,
                                          std::int64_t first_column) {
  alignas(kLineBytes) float weight[kColumns];
  widen_weights<Weight>(bits, dim, weight);
  if (s == 0.0f) {
    update_row<kMaximize, kDecay, false>(factors, s, dim, gradient, weight, exp_avg, exp_avg_sq);
  } else {
    update_row<kMaximize, kDecay, true>(factors, s, dim, gradient, weight, exp_avg, exp_avg_sq);
  }
  return round_weights<Weight>(weight, dim, stream, first_column, bits);
}

template <class Weight, bool kMaximize, Decay kDecay>
SHARDAM_INLINE std::int64_t update_rows_as(const Rows& rows) {
  const AdamJob& job = rows.job;
  const RecordLayout& layout = job.layout;
  const std::int64_t stride_bytes = job.arena.stride_bytes();
  const std::int64_t ahead = std::clamp<std::int64_t>(kAhead / stride_bytes, 1, kMaxAheadRows);
  alignas(kLineBytes) float sum[kColumns];
  std::int64_t saturated = 0;
  for (std::int64_t row = rows.first - ahead; row < rows.end; ++row) {
    if (row + ahead < rows.end) {
      const std::int64_t next = row + ahead, slot = job.slots[next];
      prefetch_record(job.arena.record(slot), stride_bytes);
      const float* gradient = job.gradients.gradients + (job.gradients.first == nullptr ? next : job.gradients.first[next]) * layout.dim;
      for (std::int64_t at = 0; at < std::min(layout.dim, kColumns); at += kLineFloats) __builtin_prefetch(gradient + at);
      if (job.touches != nullptr) __builtin_prefetch(job.touches + slot, 1);
    }
    if (row < rows.first) continue;
    std::byte* record = job.arena.record(job.slots[row]);
    auto* exp_avg = reinterpret_cast<float*>(record + layout.exp_avg);
    auto* exp_avg_sq = reinterpret_cast<float*>(record + layout.exp_avg_sq);
    const float s = job.step_factors[row];
    std::uint64_t stream = 0;
    if constexpr (!std::is_same_v<Weight, float>) {
      stream = row_key(job.rounding.table_seed, job.rounding.row_ids[row]) ^
               mix64(static_cast<std::uint64_t>(job.rounding.steps[row]));
    }
    for (std::int64_t at = 0; at < layout.dim; at += kColumns) {
      const std::int64_t size = std::min(kColumns, layout.dim - at);
      const float* gradient = merge_row<true>(job.gradients, row, at, size, sum);
      if constexpr (std::is_same_v<Weight, float>) {
        auto* weight = reinterpret_cast<float*>(record + layout.weight);
        saturated +=
            update_float32<kMaximize, kDecay>(job.factors, s, size, gradient, weight + at, exp_avg + at, exp_avg_sq + at);
      } else {
        auto* bits = reinterpret_cast<std::uint16_t*>(record + layout.weight);
        saturated += update_narrow<Weight, kMaximize, kDecay>(job.factors, s, size, gradient, bits + at, exp_avg + at,
                                                              exp_avg_sq + at, stream, at);
      }
    }
    if (job.touches != nullptr) job.touches[job.slots[row]] = job.touch;
  }
  return saturated;
}

template <class Weight>
SHARDAM_INLINE std::int64_t update_rows_of(const Rows& rows) {
  const AdamFactors& factors = rows.job.factors;
  if (factors.decoupled && factors.d != 1.0f) {
    return factors.maximize ? update_rows_as<Weight, true, Decay::kDecoupled>(rows)
                            : update_rows_as<Weight, false, Decay::kDecoupled>(rows);
  }
  if (!factors.decoupled && factors.weight_decay != 0.0f) {
    return factors.maximize ? update_rows_as<Weight, true, Decay::kCoupled>(rows)
                            : update_rows_as<Weight, false, Decay::kCoupled>(rows);
  }
  return factors.maximize ? update_rows_as<Weight, true, Decay::kNone>(rows)
                          : update_rows_as<Weight, false, Decay::kNone>(rows);
}

SHARDAM_CLONES std::int64_t update_float32_rows(const Rows& rows) { return update_rows_of<float>(rows); }
SHARDAM_CLONES std::int64_t update_bfloat16_rows(const Rows& rows) { return update_rows_of<Bfloat16>(rows); }
SHARDAM_CLONES std::int64_t update_float16_rows(const Rows& rows) { return update_rows_of<Float16>(rows); }

std::int64_t update_rows(const Rows& rows) {
  switch (rows.job.layout.dtype) {
    case Dtype::kFloat32:
      return update_float32_rows(rows);
    case Dtype::kBfloat16:
      return update_bfloat16_rows(rows);
    case Dtype::kFloat16:
      return update_float16_rows(rows);
  }
  return 0;
}

}  // namespace

std::int64_t adam_update(const AdamJob& job, int num_threads) {
  const std::int64_t bytes = job.num_rows * job.arena.stride_bytes();
  const int threads = useful_threads(num_threads, bytes, kMinBytesPerThread);
  const std::int64_t parts = useful_parts(threads, bytes, kLeastBytes);
  std::atomic<std::int64_t> saturated{0};
  run_parts(threads, parts, [&](int part) {
    saturated += update_rows({job, job.num_rows * part / parts, job.num_rows * (part + 1) / parts});
  });
  return saturated;
}

}  // namespace shardam
