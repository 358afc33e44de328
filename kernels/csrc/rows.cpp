#include "rows.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "parallel.h"
#include "slots.h"

namespace shardam {
namespace {

constexpr std::int64_t kPrefetchBytes = 4096;  // records are prefetched about this far ahead ...
constexpr std::int64_t kMaxPrefetchRows = 16;  // ... but not more of them than a core keeps in flight
constexpr std::int64_t kLineBytes = 64;

// Writes an absent row's weight as it would be read after it was stored. Bits of narrow weights go by `scratch`, [dim].
void write_absent_row(const GatherJob& job, std::int64_t row_id, std::uint16_t* scratch, float* out) {
  write_initial_row(job.initial, row_id, job.layout.dim, out);
  if (job.layout.dtype == Dtype::kFloat32) return;
  auto* bits = reinterpret_cast<std::byte*>(scratch);
  write_weights(job.layout.dtype, out, job.layout.dim, bits);
  read_weights(job.layout.dtype, bits, job.layout.dim, out);
}

void gather_range(const GatherJob& job, std::int64_t first, std::int64_t end) {
  const std::int64_t dim = job.layout.dim;
  const std::int64_t size = dim * item_bytes(job.layout.dtype);
  std::vector<std::uint16_t> scratch(static_cast<std::size_t>(job.layout.dtype == Dtype::kFloat32 ? 0 : dim));
  const std::int64_t ahead = std::clamp<std::int64_t>(kPrefetchBytes / size, 1, kMaxPrefetchRows);
  for (std::int64_t i = first; i < end; ++i) {
    if (i + ahead < end && job.slots[i + ahead] != kNoSlot) {
      const std::byte* next = job.arena.record(job.slots[i + ahead]) + job.layout.weight;
      for (std::int64_t at = 0; at < std::min(size, kPrefetchBytes); at += kLineBytes) __builtin_prefetch(next + at);
    }
    float* out = job.out + i * dim;
    if (job.slots[i] == kNoSlot) {
      write_absent_row(job, job.row_ids[i], scratch.data(), out);
    } else {
      read_weights(job.layout.dtype, job.arena.record(job.slots[i]) + job.layout.weight, dim, out);
    }
  }
}

}  // namespace

std::int64_t initialize_rows(const Arena& arena, const RecordLayout& layout, const InitialRows& initial,
                             const std::int64_t* slots, const std::int64_t* row_ids, std::int64_t count) {
  ScopedFloatMode mode;
  std::vector<float> weight(static_cast<std::size_t>(layout.dim));
  std::int64_t saturated = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    std::byte* record = arena.record(slots[i]);
    std::memset(record, 0, static_cast<std::size_t>(arena.stride_bytes()));
    write_initial_row(initial, row_ids[i], layout.dim, weight.data());
    saturated += write_weights(layout.dtype, weight.data(), layout.dim, record + layout.weight);
  }
  return saturated;
}

void gather_weights(const GatherJob& job, int num_threads) {
  const auto bytes = job.count * job.layout.dim * std::int64_t{sizeof(float)};
  const int parts = useful_threads(num_threads, bytes, kMinBytesPerThread);
  run_parts(parts, [&](int part) { gather_range(job, job.count * part / parts, job.count * (part + 1) / parts); });
}

void read_component(const Arena& arena, ComponentPlace place, const std::int64_t* slots, std::int64_t count, float* out) {
  ScopedFloatMode mode;
  for (std::int64_t i = 0; i < count; ++i) {
    float* row = out + i * place.dim;
    if (slots[i] == kNoSlot) {
      std::fill(row, row + place.dim, 0.0f);
    } else {
      read_weights(place.dtype, arena.record(slots[i]) + place.offset_bytes, place.dim, row);
    }
  }
}

std::int64_t write_component(const Arena& arena, ComponentPlace place, const std::int64_t* slots, std::int64_t count,
                             const float* values) {
  ScopedFloatMode mode;
  std::int64_t saturated = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    saturated += write_weights(place.dtype, values + i * place.dim, place.dim, arena.record(slots[i]) + place.offset_bytes);
  }
  return saturated;
}

}  // namespace shardam
