#include "rows.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "array_index.h"
#include "groups.h"
#include "hash_index.h"
#include "parallel.h"
#include "slots.h"

namespace shardam {
namespace {

constexpr std::int64_t kPrefetchBytes = 4096;  // records are prefetched about this far ahead ...
constexpr std::int64_t kMaxPrefetchRows = 16;  // ... but not more of them than a core keeps in flight
constexpr std::int64_t kLineBytes = 64;
constexpr std::int64_t kBlock = 256;  // rows that are looked up before the first of them is read: their slots stay in L1
constexpr std::int64_t kLeastBytes = 1 << 15;  // of weights, of a part: to gather them takes about as long as waking a thread

// Writes an absent row's weight as it would be read after it was stored. Bits of narrow weights go by `scratch`, [dim].
void write_absent_row(const GatherJob& job, std::int64_t row_id, std::uint16_t* scratch, float* out) {
  write_initial_row(job.initial, row_id, job.layout.dim, out);
  if (job.layout.dtype == Dtype::kFloat32) return;
  auto* bits = reinterpret_cast<std::byte*>(scratch);
  write_weights(job.layout.dtype, out, job.layout.dim, bits);
  read_weights(job.layout.dtype, bits, job.layout.dim, out);
}

// A call of memcpy costs about as much as what it copies of a row.
SHARDAM_INLINE void copy_row(const std::byte* from, std::int64_t dim, float* out) {
  constexpr std::int64_t kLineFloats = kLineBytes / sizeof(float);
  const auto* values = reinterpret_cast<const float*>(from);
  std::int64_t at = 0;
  for (; at + kLineFloats <= dim; at += kLineFloats) std::memcpy(out + at, values + at, kLineBytes);
  for (; at < dim; ++at) out[at] = values[at];
}

// Rows first .. end - 1; slots[0] is that of the first.
SHARDAM_CLONES void gather_block(const GatherJob& job, const std::int64_t* slots, std::int64_t first, std::int64_t end,
                                 std::uint16_t* scratch) {
  const std::int64_t dim = job.layout.dim, size = dim * item_bytes(job.layout.dtype);
  const std::int64_t ahead = std::clamp<std::int64_t>(kPrefetchBytes / size, 1, kMaxPrefetchRows);
  for (std::int64_t row = first - ahead; row < end; ++row) {
    const std::int64_t next = row + ahead;
    if (next < end && slots[next - first] != kNoSlot) {
      const std::byte* record = job.arena.record(slots[next - first]) + job.layout.weight;
      for (std::int64_t at = 0; at < std::min(size, kPrefetchBytes); at += kLineBytes) __builtin_prefetch(record + at);
    }
    if (row < first) continue;
    float* out = job.out + row * dim;
    const std::int64_t slot = slots[row - first];
    if (slot == kNoSlot) {
      write_absent_row(job, job.row_ids[row], scratch, out);
    } else if (job.layout.dtype == Dtype::kFloat32) {
      copy_row(job.arena.record(slot) + job.layout.weight, dim, out);
    } else {
      read_weights(job.layout.dtype, job.arena.record(slot) + job.layout.weight, dim, out);
    }
  }
}

// Gathers in parts; write_slots(first, count, out) says which records.
template <class WriteSlots>
void gather_parts(const GatherJob& job, int num_threads, const WriteSlots& write_slots) {
  const std::int64_t dim = job.layout.dim, bytes = job.count * dim * std::int64_t{sizeof(float)};
  const int threads = useful_threads(num_threads, bytes, kMinBytesPerThread);
  const std::int64_t parts = useful_parts(threads, bytes, kLeastBytes);
  const std::int64_t scratch_size = job.layout.dtype == Dtype::kFloat32 ? 0 : dim;
  const Buffer<std::uint16_t> scratch(parts * scratch_size);
  run_parts(threads, parts, [&](int part) {
    std::int64_t slots[kBlock];
    const std::int64_t part_end = job.count * (part + 1) / parts;
    for (std::int64_t first = job.count * part / parts; first < part_end; first += kBlock) {
      const std::int64_t end = std::min(first + kBlock, part_end);
      write_slots(first, end - first, slots);
      gather_block(job, slots, first, end, scratch.data() + part * scratch_size);
    }
  });
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

void gather_weights(const GatherJob& job, const std::int64_t* slots, int num_threads) {
  gather_parts(job, num_threads, [&](std::int64_t first, std::int64_t count, std::int64_t* out) {
    std::copy(slots + first, slots + first + count, out);
  });
}

template <class Index>
void gather_rows(const GatherJob& job, const Index& index, int num_threads) {
  index.check(job.row_ids, job.count);
  gather_parts(job, num_threads, [&](std::int64_t first, std::int64_t count, std::int64_t* out) {
    index.lookup_checked(job.row_ids + first, count, out);
  });
}

template void gather_rows(const GatherJob&, const HashIndex&, int);
template void gather_rows(const GatherJob&, const ArrayIndex&, int);

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
