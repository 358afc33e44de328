#include "adam.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>

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

enum class Decay { kNone, kCoupled, kDecoupled };

// Rows of one chunk: a base pointer and each record's distance from it.
struct Rows {
  std::byte* base;
  const std::int64_t* distances;
  const float* gradients;
  const float* step_factors;
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
    std::uint32_t bits;
    std::memcpy(&bits, &w, sizeof bits);
    peak = std::max(peak, bits & 0x7fffffffu);
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

template <bool kMaximize, Decay kDecay>
SHARDAM_INLINE std::int64_t update_rows_as(const Rows& rows) {
  const RecordLayout& layout = rows.layout;
  std::int64_t saturated = 0;
  for (std::int64_t i = 0; i < rows.count; ++i) {
    if (i + kPrefetchRows < rows.count) {
      prefetch_record(rows.base + rows.distances[i + kPrefetchRows] * kUnitBytes, rows.stride_bytes);
    }
    std::byte* record = rows.base + rows.distances[i] * kUnitBytes;
    auto* weight = reinterpret_cast<float*>(record + layout.weight);
    auto* exp_avg = reinterpret_cast<float*>(record + layout.exp_avg);
    auto* exp_avg_sq = reinterpret_cast<float*>(record + layout.exp_avg_sq);
    const float* gradient = rows.gradients + i * layout.dim;
    const float s = rows.step_factors[i];
    // s = 0 (a warm-up's lr) leaves the weight as it is, also where the quotient is infinite and 0 * inf would be NaN.
    const std::uint32_t peak =
        s == 0.0f ? update_row<kMaximize, kDecay, false>(rows.factors, s, layout.dim, gradient, weight, exp_avg, exp_avg_sq)
                  : update_row<kMaximize, kDecay, true>(rows.factors, s, layout.dim, gradient, weight, exp_avg, exp_avg_sq);
    if (peak >= kInfinityBits) saturated += saturate(weight, layout.dim);
  }
  return saturated;
}

SHARDAM_CLONES std::int64_t update_rows(const Rows& rows) {
  const AdamFactors& factors = rows.factors;
  if (factors.decoupled && factors.d != 1.0f) {
    return factors.maximize ? update_rows_as<true, Decay::kDecoupled>(rows) : update_rows_as<false, Decay::kDecoupled>(rows);
  }
  if (!factors.decoupled && factors.weight_decay != 0.0f) {
    return factors.maximize ? update_rows_as<true, Decay::kCoupled>(rows) : update_rows_as<false, Decay::kCoupled>(rows);
  }
  return factors.maximize ? update_rows_as<true, Decay::kNone>(rows) : update_rows_as<false, Decay::kNone>(rows);
}

std::int64_t update_range(const AdamJob& job, std::int64_t first, std::int64_t end) {
  std::int64_t distances[kChunk];
  std::int64_t saturated = 0;
  for (std::int64_t at = first; at < end; at += kChunk) {
    const std::int64_t size = std::min(kChunk, end - at);
    for (std::int64_t i = 0; i < size; ++i) distances[i] = job.arena.distance(job.slots[at + i]);
    saturated += update_rows({job.arena.base(), distances, job.gradients + at * job.layout.dim, job.step_factors + at, size,
                              job.arena.stride_bytes(), job.layout, job.factors});
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
