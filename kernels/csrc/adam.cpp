#include "adam.h"

#include <algorithm>
#include <atomic>
#include <cfloat>
#include <cmath>

#include "dispatch.h"
#include "parallel.h"

namespace shardam {
namespace {

constexpr float kDecayedGradientLimit = 18446742974197923840.0f;  // 2^64 - 2^40, the float below 2^64
constexpr std::uint32_t kInfinityBits = 0x7f800000u;
constexpr std::int64_t kLineBytes = 64;
constexpr std::int64_t kLanes = kLineBytes / sizeof(float);
constexpr std::int64_t kChunk = 32;      // rows whose records and gradients are found before the first of them is updated
constexpr std::int64_t kColumns = 512;   // of a row at a time, so that what is made of them fits the stack
constexpr std::int64_t kAhead = 3 << 12;  // bytes of records that are prefetched: far enough for a walk through page tables ...
constexpr std::int64_t kMaxAhead = 32;   // ... but no more rows (at most kChunk)
constexpr int kLocality = 2;  // into L2: of what is under way to L1 a core can hold fewer lines than two records have
constexpr std::int64_t kLeastBytes = 1 << 15;  // of records, of a part: to update them takes about as long as waking a thread

enum class Decay { kNone, kCoupled, kDecoupled };

// Some columns of a chunk of rows.
struct Tile {
  std::byte* records[2 * kChunk];  // of the rows, and of those that come next
  const float* gradients[kChunk];          // merged, of these columns
  float step_factors[kChunk];
  std::int64_t num_rows;
  std::int64_t num_records;
  std::int64_t ahead;  // rows
  std::int64_t column;
  std::int64_t size;  // columns
  bool some_stay;     // the weight of a row whose factor is 0, a warm-up's, stays
};

SHARDAM_INLINE float clamp(float value, float limit) {
  const float upper = value < limit ? value : limit;
  return upper > -limit ? upper : -limit;
}

// The largest magnitudes among new weights, as bits, by column modulo kLanes: to bring them down to one number for a row would
// cost a quarter of its update.
struct Peaks {
  alignas(kLineBytes) std::uint32_t lanes[kLanes] = {};

  SHARDAM_INLINE bool has_infinity() const { return *std::max_element(lanes, lanes + kLanes) >= kInfinityBits; }
};

template <bool kMaximize, Decay kDecay, bool kMoveWeight>
SHARDAM_INLINE void update_value(const AdamFactors& factors, float s, float gradient, float& weight, float& exp_avg,
                                 float& exp_avg_sq, std::uint32_t& peak) {
  float g = kMaximize ? -gradient : gradient;
  float w = weight;
  if (kDecay == Decay::kCoupled) g = clamp(g + factors.weight_decay * w, kDecayedGradientLimit);
  if (kDecay == Decay::kDecoupled) w = clamp(w * factors.d, FLT_MAX);
  const float m = exp_avg + (g - exp_avg) * factors.c1;
  const float v = exp_avg_sq + (g * g - exp_avg_sq) * factors.c2;
  exp_avg = m;
  exp_avg_sq = v;
  if (kMoveWeight) w = w - s * (m / (std::sqrt(v) + factors.eps));
  weight = w;
  peak = std::max(peak, float_bits(w) & 0x7fffffffu);
}

// Columns of one row.
template <bool kMaximize, Decay kDecay, bool kMoveWeight>
SHARDAM_INLINE void update_columns(const AdamFactors& factors, float s, std::int64_t size, const float* __restrict gradient,
                                   float* __restrict weight, float* __restrict exp_avg, float* __restrict exp_avg_sq,
                                   Peaks& peaks) {
  std::int64_t at = 0;
  for (; at + kLanes <= size; at += kLanes) {  // a number of columns that the compiler knows: no code for what is left
    for (std::int64_t lane = 0; lane < kLanes; ++lane) {
      const std::int64_t j = at + lane;
      update_value<kMaximize, kDecay, kMoveWeight>(factors, s, gradient[j], weight[j], exp_avg[j], exp_avg_sq[j],
                                                   peaks.lanes[lane]);
    }
  }
  for (std::int64_t lane = 0; at + lane < size; ++lane) {
    const std::int64_t j = at + lane;
    update_value<kMaximize, kDecay, kMoveWeight>(factors, s, gradient[j], weight[j], exp_avg[j], exp_avg_sq[j],
                                                 peaks.lanes[lane]);
  }
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

// Prefetches some columns of a component.
SHARDAM_INLINE void prefetch(const std::byte* from, std::int64_t size_bytes) {
  for (std::int64_t at = 0; at < size_bytes; at += kLineBytes) __builtin_prefetch(from + at, 0, kLocality);
}

// Updates a tile of rows whose weights are float32. kSize is the number of columns, or 0 for any.
template <bool kMaximize, Decay kDecay, bool kSomeStay, std::int64_t kSize>
SHARDAM_INLINE void update_tile(const AdamJob& job, const Tile& tile, Peaks& peaks) {
  const AdamFactors factors = job.factors;
  const std::int64_t size = kSize == 0 ? tile.size : kSize, size_bytes = size * std::int64_t{sizeof(float)};
  const std::int64_t at = tile.column * std::int64_t{sizeof(float)};
  const std::int64_t weight_at = job.layout.weight + at, avg_at = job.layout.exp_avg + at, sq_at = job.layout.exp_avg_sq + at;
  for (std::int64_t row = 0; row < tile.num_rows; ++row) {
    if (row + tile.ahead < tile.num_records) {
      const std::byte* next = tile.records[row + tile.ahead];
      prefetch(next + weight_at, size_bytes);
      prefetch(next + avg_at, size_bytes);
      prefetch(next + sq_at, size_bytes);
    }
    auto* weight = reinterpret_cast<float*>(tile.records[row] + weight_at);
    auto* exp_avg = reinterpret_cast<float*>(tile.records[row] + avg_at);
    auto* exp_avg_sq = reinterpret_cast<float*>(tile.records[row] + sq_at);
    const float s = tile.step_factors[row];
    if (kSomeStay && s == 0.0f) {
      update_columns<kMaximize, kDecay, false>(factors, s, size, tile.gradients[row], weight, exp_avg, exp_avg_sq, peaks);
    } else {
      update_columns<kMaximize, kDecay, true>(factors, s, size, tile.gradients[row], weight, exp_avg, exp_avg_sq, peaks);
    }
  }
}

// Updates a tile of rows whose weights are below float32; first_row is the number of its first one in the job. Returns how many
// weights were saturated.
template <class Weight, bool kMaximize, Decay kDecay>
SHARDAM_INLINE std::int64_t update_narrow_tile(const AdamJob& job, const Tile& tile, std::int64_t first_row) {
  alignas(kLineBytes) float weight[kColumns];
  const std::int64_t size = tile.size, at = tile.column;
  std::int64_t saturated = 0;
  Peaks unused;
  for (std::int64_t row = 0; row < tile.num_rows; ++row) {
    if (row + tile.ahead < tile.num_records) {
      const std::byte* next = tile.records[row + tile.ahead];
      prefetch(next + job.layout.weight + at * std::int64_t{sizeof(std::uint16_t)}, size * std::int64_t{sizeof(std::uint16_t)});
      prefetch(next + job.layout.exp_avg + at * std::int64_t{sizeof(float)}, size * std::int64_t{sizeof(float)});
      prefetch(next + job.layout.exp_avg_sq + at * std::int64_t{sizeof(float)}, size * std::int64_t{sizeof(float)});
    }
    auto* bits = reinterpret_cast<std::uint16_t*>(tile.records[row] + job.layout.weight) + at;
    auto* exp_avg = reinterpret_cast<float*>(tile.records[row] + job.layout.exp_avg) + at;
    auto* exp_avg_sq = reinterpret_cast<float*>(tile.records[row] + job.layout.exp_avg_sq) + at;
    const float s = tile.step_factors[row];
    widen_weights<Weight>(bits, size, weight);
    if (s == 0.0f) {
      update_columns<kMaximize, kDecay, false>(job.factors, s, size, tile.gradients[row], weight, exp_avg, exp_avg_sq, unused);
    } else {
      update_columns<kMaximize, kDecay, true>(job.factors, s, size, tile.gradients[row], weight, exp_avg, exp_avg_sq, unused);
    }
    const Rounding& rounding = job.rounding;
    const std::uint64_t stream = row_key(rounding.table_seed, rounding.row_ids[first_row + row]) ^
                                 mix64(static_cast<std::uint64_t>(rounding.steps[first_row + row]));
    saturated += round_weights<Weight>(weight, size, stream, at, bits);
  }
  return saturated;
}

// Rows of the usual sizes, in the usual case, have code of their own, a third shorter: so more rows are in flight at a time.
template <bool kMaximize, Decay kDecay>
SHARDAM_INLINE void update_float32_tile(const AdamJob& job, const Tile& tile, Peaks& peaks) {
  if (tile.some_stay) return update_tile<kMaximize, kDecay, true, 0>(job, tile, peaks);
  if (!kMaximize && kDecay == Decay::kNone) {
    switch (tile.size) {
      case 16:
        return update_tile<kMaximize, kDecay, false, 16>(job, tile, peaks);
      case 32:
        return update_tile<kMaximize, kDecay, false, 32>(job, tile, peaks);
      case 64:
        return update_tile<kMaximize, kDecay, false, 64>(job, tile, peaks);
      case 128:
        return update_tile<kMaximize, kDecay, false, 128>(job, tile, peaks);
    }
  }
  update_tile<kMaximize, kDecay, false, 0>(job, tile, peaks);
}

template <bool kMaximize, Decay kDecay>
SHARDAM_INLINE std::int64_t update_tile_as(const AdamJob& job, const Tile& tile, std::int64_t first_row, Peaks& peaks) {
  switch (job.layout.dtype) {
    case Dtype::kFloat32:
      update_float32_tile<kMaximize, kDecay>(job, tile, peaks);
      return 0;
    case Dtype::kBfloat16:
      return update_narrow_tile<Bfloat16, kMaximize, kDecay>(job, tile, first_row);
    case Dtype::kFloat16:
      return update_narrow_tile<Float16, kMaximize, kDecay>(job, tile, first_row);
  }
  return 0;
}

template <Decay kDecay>
SHARDAM_INLINE std::int64_t update_tile_of(const AdamJob& job, const Tile& tile, std::int64_t first_row, Peaks& peaks) {
  return job.factors.maximize ? update_tile_as<true, kDecay>(job, tile, first_row, peaks)
                              : update_tile_as<false, kDecay>(job, tile, first_row, peaks);
}

// One function for each kind of decay, so that none is too large to be optimised.
SHARDAM_CLONES std::int64_t update_plain(const AdamJob& job, const Tile& tile, std::int64_t first_row, Peaks& peaks) {
  return update_tile_of<Decay::kNone>(job, tile, first_row, peaks);
}
SHARDAM_CLONES std::int64_t update_coupled(const AdamJob& job, const Tile& tile, std::int64_t first_row, Peaks& peaks) {
  return update_tile_of<Decay::kCoupled>(job, tile, first_row, peaks);
}
SHARDAM_CLONES std::int64_t update_decoupled(const AdamJob& job, const Tile& tile, std::int64_t first_row, Peaks& peaks) {
  return update_tile_of<Decay::kDecoupled>(job, tile, first_row, peaks);
}

std::int64_t update_tile_decayed(const AdamJob& job, const Tile& tile, std::int64_t first_row, Peaks& peaks) {
  if (job.factors.decoupled && job.factors.d != 1.0f) return update_decoupled(job, tile, first_row, peaks);
  if (!job.factors.decoupled && job.factors.weight_decay != 0.0f) return update_coupled(job, tile, first_row, peaks);
  return update_plain(job, tile, first_row, peaks);
}

// Points a tile at the merged gradients of its rows; those that are sums go to `sums`, [kChunk, kColumns].
SHARDAM_CLONES void merge_tile(const StepGradients& step, std::int64_t first_row, float* sums, Tile& tile) {
  for (std::int64_t row = 0; row < tile.num_rows; ++row) {
    tile.gradients[row] = merge_row<true>(step, first_row + row, tile.column, tile.size, sums + row * tile.size);
  }
}

// Prefetches the gradients of rows first .. end - 1, which were last seen when they were checked; of a long run the first ones.
void prefetch_gradients(const StepGradients& step, std::int64_t first, std::int64_t end) {
  const std::int64_t size = std::min(step.dim, kColumns);
  for (std::int64_t row = first; row < end; ++row) {
    std::int64_t i = step.first == nullptr ? row : step.first[row];
    for (std::int64_t place = 0; place < kLead && i >= 0; ++place) {
      prefetch_columns(step, i, 0, size);
      i = step.next == nullptr ? -1 : step.next[i];
    }
  }
}

// Finds the records of rows first .. end - 1, and prefetches what belongs to them elsewhere.
void find_records(const AdamJob& job, std::int64_t first, std::int64_t end, std::byte** records) {
  for (std::int64_t row = first; row < end; ++row) {
    records[row - first] = job.arena.record(job.slots[row]);
    if (job.touches != nullptr) __builtin_prefetch(job.touches + job.slots[row], 1);
  }
  prefetch_gradients(job.gradients, first, end);
}

// Updates rows first .. end - 1; returns how many weights were saturated.
std::int64_t update_rows(const AdamJob& job, std::int64_t first, std::int64_t end) {
  alignas(kLineBytes) float sums[kChunk * kColumns];
  Tile tile;
  Peaks peaks;
  tile.ahead = std::clamp<std::int64_t>(kAhead / job.arena.stride_bytes(), 1, kMaxAhead);
  std::int64_t saturated = 0;
  find_records(job, first, std::min(first + kChunk, end), tile.records + kChunk);
  for (std::int64_t row = first; row < end; row += kChunk) {
    tile.num_rows = std::min(kChunk, end - row);
    tile.num_records = std::min(2 * kChunk, end - row);
    std::copy(tile.records + kChunk, tile.records + 2 * kChunk, tile.records);
    find_records(job, row + tile.num_rows, row + tile.num_records, tile.records + kChunk);
    tile.some_stay = false;
    for (std::int64_t i = 0; i < tile.num_rows; ++i) {
      tile.step_factors[i] = job.step_factors[row + i];
      tile.some_stay |= tile.step_factors[i] == 0.0f;
    }
    for (tile.column = 0; tile.column < job.layout.dim; tile.column += kColumns) {
      tile.size = std::min(kColumns, job.layout.dim - tile.column);
      merge_tile(job.gradients, row, sums, tile);
      saturated += update_tile_decayed(job, tile, row, peaks);
    }
    for (std::int64_t i = 0; i < tile.num_rows && job.touches != nullptr; ++i) job.touches[job.slots[row + i]] = job.touch;
  }
  if (job.layout.dtype != Dtype::kFloat32 || !peaks.has_infinity()) return saturated;
  for (std::int64_t row = first; row < end; ++row) {
    saturated += saturate(reinterpret_cast<float*>(job.arena.record(job.slots[row]) + job.layout.weight), job.layout.dim);
  }
  return saturated;
}

}  // namespace

std::int64_t adam_update(const AdamJob& job, int num_threads) {
  const std::int64_t bytes = job.num_rows * job.arena.stride_bytes();
  const int threads = useful_threads(num_threads, bytes, kMinBytesPerThread);
  const std::int64_t parts = useful_parts(threads, bytes, kLeastBytes);
  std::atomic<std::int64_t> saturated{0};
  run_parts(threads, parts, [&](int part) {
    saturated += update_rows(job, job.num_rows * part / parts, job.num_rows * (part + 1) / parts);
  });
  return saturated;
}

}  // namespace shardam
