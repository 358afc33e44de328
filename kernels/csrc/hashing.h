// The hashes of CONTRACT.md; shardam_kernels/hashing.py is the same in NumPy.
#pragma once

#include <cstdint>

#include "dispatch.h"

namespace shardam {

constexpr std::uint64_t kGolden = 0x9e3779b97f4a7c15ull;

SHARDAM_INLINE std::uint64_t mix64(std::uint64_t value) {
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ull;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebull;
  return value ^ (value >> 31);
}

// The inverse of mix64; the factors are the inverses of its multipliers modulo 2^64.
SHARDAM_INLINE std::uint64_t unmix64(std::uint64_t value) {
  value = (value ^ (value >> 31) ^ (value >> 62)) * 0x319642b2d24d8ec3ull;
  value = (value ^ (value >> 27) ^ (value >> 54)) * 0x96de1b173f119089ull;
  return value ^ (value >> 30) ^ (value >> 60);
}

SHARDAM_INLINE std::uint64_t row_key(std::uint64_t table_seed, std::int64_t row_id) {
  return mix64(table_seed + kGolden * mix64(static_cast<std::uint64_t>(row_id)));
}

// hash(id, t, column), where stream = row_key ^ mix64(t).
SHARDAM_INLINE std::uint32_t element_hash(std::uint64_t stream, std::int64_t column) {
  return static_cast<std::uint32_t>(mix64(stream + kGolden * static_cast<std::uint64_t>(column + 1)) >> 32);
}

}  // namespace shardam
