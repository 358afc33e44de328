#include "rows.h"

#include <algorithm>
#include <cstring>

#include "parallel.h"
#include "slots.h"

namespace shardam {
namespace {

constexpr std::int64_t kPrefetchBytes = 4096;  // records are prefetched about this far ahead ...
constexpr std::int64_t kMaxPrefetchRows = 16;  // ... but not more of them than a core keeps in flight
constexpr std::int64_t kLineBytes = 64;

std::size_t row_bytes(std::int64_t dim) { return static_cast<std::size_t>(dim) * sizeof(float); }

void gather_range(const GatherJob& job, std::int64_t first, std::int64_t end) {
  const std::int64_t dim = job.layout.dim;
  const auto size = static_cast<std::int64_t>(row_bytes(dim));
  const std::int64_t ahead = std::clamp<std::int64_t>(kPrefetchBytes / size, 1, kMaxPrefetchRows);
  for (std::int64_t i = first; i < end; ++i) {
    if (i + ahead < end && job.slots[i + ahead] != kNoSlot) {
      const std::byte* next = job.arena.record(job.slots[i + ahead]) + job.layout.weight;
      for (std::int64_t at = 0; at < std::min(size, kPrefetchBytes); at += kLineBytes) __builtin_prefetch(next + at);
    }
    float* out = job.out + i * dim;
    if (job.slots[i] == kNoSlot) {
      write_initial_row(job.initial, job.row_ids[i], dim, out);
    } else {
      std::memcpy(out, job.arena.record(job.slots[i]) + job.layout.weight, row_bytes(dim));
    }
  }
}

}  // namespace

void initialize_rows(const Arena& arena, const RecordLayout& layout, const InitialRows& initial, const std::int64_t* slots,
                     const std::int64_t* row_ids, std::int64_t count) {
  ScopedFloatMode mode;
  for (std::int64_t i = 0; i < count; ++i) {
    std::byte* record = arena.record(slots[i]);
    std::memset(record, 0, static_cast<std::size_t>(arena.stride_bytes()));
    write_initial_row(initial, row_ids[i], layout.dim, reinterpret_cast<float*>(record + layout.weight));
  }
}

void gather_weights(const GatherJob& job, int num_threads) {
  const auto bytes = job.count * static_cast<std::int64_t>(row_bytes(job.layout.dim));
  const int parts = useful_threads(num_threads, bytes, kMinBytesPerThread);
  run_parts(parts, [&](int part) { gather_range(job, job.count * part / parts, job.count * (part + 1) / parts); });
}

void read_component(const Arena& arena, ComponentPlace place, const std::int64_t* slots, std::int64_t count, float* out) {
  for (std::int64_t i = 0; i < count; ++i) {
    float* row = out + i * place.dim;
    if (slots[i] == kNoSlot) {
      std::fill(row, row + place.dim, 0.0f);
    } else {
      std::memcpy(row, arena.record(slots[i]) + place.offset_bytes, row_bytes(place.dim));
    }
  }
}

void write_component(const Arena& arena, ComponentPlace place, const std::int64_t* slots, std::int64_t count,
                     const float* values) {
  for (std::int64_t i = 0; i < count; ++i) {
    std::memcpy(arena.record(slots[i]) + place.offset_bytes, values + i * place.dim, row_bytes(place.dim));
  }
}

}  // namespace shardam
