#include "adam.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <type_traits>

#include "dispatch.h"
#include "parallel.h"

namespace shardam {
namespace {

constexpr float kDecayedGradientLimit = 18446742974197923840.0f;  // 2^64 - 2^40, the float below 2^64
constexpr std::uint32_t kInfinityBits = 0x7f800000u;
constexpr std::int64_t kChunk = 64;          // rows whose distances are looked up together
constexpr std::int64_t kPrefetchRows = 4;    // records ahead
constexpr std::int64_t kLineBytes = 64;
constexpr std::int64_t kMaxPrefetchBytes = 4096;  // of one record; longer ones the hardware's own prefetch follows
constexpr std::int64_t kColumns = 512;  // of a narrow weight that are float32 at a time: they and their moments stay in L1

enum class Decay { kNone, kCoupled, kDecoupled };

// Rows of one chunk: a base pointer and each record's distance from it.
struct Rows {
  std::byte* base;
  const std::int64_t* distances;
  const float* gradients;
  const float* step_factors;
  Rounding rounding;
  std::int64_t count;
  std::int64_t stride_bytes;
  RecordLayout layout;
  AdamFactors factors;
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

// The same for a weight below float32: widened, updated and rounded by columns.
template <class Weight, bool kMaximize, Decay kDecay>
SHARDAM_INLINE std::int64_t update_narrow(const AdamFactors& factors, float s, std::int64_t dim, const float* gradient,
                                          std::uint16_t* bits, float* exp_avg, float* exp_avg_sq, std::uint64_t stream) {
  alignas(kLineBytes) float weight[kColumns];
  std::int64_t saturated = 0;
  for (std::int64_t at = 0; at < dim; at += kColumns) {
    const std::int64_t size = std::min(kColumns, dim - at);
    widen_weights<Weight>(bits + at, size, weight);
    if (s == 0.0f) {
      update_row<kMaximize, kDecay, false>(factors, s, size, gradient + at, weight, exp_avg + at, exp_avg_sq + at);
    } else {
      update_row<kMaximize, kDecay, true>(factors, s, size, gradient + at, weight, exp_avg + at, exp_avg_sq + at);
    }
    saturated += round_weights<Weight>(weight, size, stream, at, bits + at);
  }
  return saturated;
}

template <class Weight, bool kMaximize, Decay kDecay>
SHARDAM_INLINE std::int64_t update_rows_as(const Rows& rows) {
  const RecordLayout& layout = rows.layout;
  std::int64_t saturated = 0;
  for (std::int64_t i = 0; i < rows.count; ++i) {
    if (i + kPrefetchRows < rows.count) {
      prefetch_record(rows.base + rows.distances[i + kPrefetchRows] * kUnitBytes, rows.stride_bytes);
    }
    std::byte* record = rows.base + rows.distances[i] * kUnitBytes;
    auto* exp_avg = reinterpret_cast<float*>(record + layout.exp_avg);
    auto* exp_avg_sq = reinterpret_cast<float*>(record + layout.exp_avg_sq);
    const float* gradient = rows.gradients + i * layout.dim;
    const float s = rows.step_factors[i];
    if constexpr (std::is_same_v<Weight, float>) {
      auto* weight = reinterpret_cast<float*>(record + layout.weight);
      saturated += update_float32<kMaximize, kDecay>(rows.factors, s, layout.dim, gradient, weight, exp_avg, exp_avg_sq);
    } else {
      const std::uint64_t stream = row_key(rows.rounding.table_seed, rows.rounding.row_ids[i]) ^
                                   mix64(static_cast<std::uint64_t>(rows.rounding.steps[i]));
      auto* bits = reinterpret_cast<std::uint16_t*>(record + layout.weight);
      saturated +=
          update_narrow<Weight, kMaximize, kDecay>(rows.factors, s, layout.dim, gradient, bits, exp_avg, exp_avg_sq, stream);
    }
  }
  return saturated;
}

template <class Weight>
SHARDAM_INLINE std::int64_t update_rows_of(const Rows& rows) {
  const AdamFactors& factors = rows.factors;
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
  switch (rows.layout.dtype) {
    case Dtype::kFloat32:
      return update_float32_rows(rows);
    case Dtype::kBfloat16:
      return update_bfloat16_rows(rows);
    case Dtype::kFloat16:
      return update_float16_rows(rows);
  }
  return 0;
}

std::int64_t update_range(const AdamJob& job, std::int64_t first, std::int64_t end) {
  std::int64_t distances[kChunk];
  std::int64_t saturated = 0;
  for (std::int64_t at = first; at < end; at += kChunk) {
    const std::int64_t size = std::min(kChunk, end - at);
    for (std::int64_t i = 0; i < size; ++i) distances[i] = job.arena.distance(job.slots[at + i]);
    Rounding rounding = job.rounding;
    if (rounding.row_ids != nullptr) {
      rounding.row_ids += at;
      rounding.steps += at;
    }
    saturated += update_rows({job.arena.base(), distances, job.gradients + at * job.layout.dim, job.step_factors + at, rounding,
                              size, job.arena.stride_bytes(), job.layout, job.factors});
  }
  return saturated;
}

}  // namespace

std::int64_t adam_update(const AdamJob& job, int num_threads) {
  const int parts = useful_threads(num_threads, job.count * job.arena.stride_bytes(), kMinBytesPerThread);
  std::int64_t saturated[kMaxThreads] = {};
  run_parts(parts, [&](int part) {
    saturated[part] = update_range(job, job.count * part / parts, job.count * (part + 1) / parts);
  });
  std::int64_t total = 0;
  for (const std::int64_t count : saturated) total += count;
  return total;
}

}  // namespace shardam
