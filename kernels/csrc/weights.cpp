#include "weights.h"

namespace shardam {
namespace {

SHARDAM_CLONES void widen_bfloat16(const std::uint16_t* bits, std::int64_t count, float* out) {
  widen_weights<Bfloat16>(bits, count, out);
}

SHARDAM_CLONES void widen_float16(const std::uint16_t* bits, std::int64_t count, float* out) {
  widen_weights<Float16>(bits, count, out);
}

SHARDAM_CLONES std::uint32_t round_bfloat16(const float* values, std::int64_t count, std::uint16_t* out) {
  return round_weights<Bfloat16>(values, count, out);
}

SHARDAM_CLONES std::uint32_t round_float16(const float* values, std::int64_t count, std::uint16_t* out) {
  return round_weights<Float16>(values, count, out);
}

}  // namespace

void read_weights(Dtype dtype, const std::byte* from, std::int64_t count, float* out) {
  switch (dtype) {
    case Dtype::kFloat32:
      std::memcpy(out, from, static_cast<std::size_t>(count) * sizeof(float));
      break;
    case Dtype::kBfloat16:
      widen_bfloat16(reinterpret_cast<const std::uint16_t*>(from), count, out);
      break;
    case Dtype::kFloat16:
      widen_float16(reinterpret_cast<const std::uint16_t*>(from), count, out);
      break;
  }
}

std::int64_t write_weights(Dtype dtype, const float* values, std::int64_t count, std::byte* to) {
  switch (dtype) {
    case Dtype::kFloat32:
      std::memcpy(to, values, static_cast<std::size_t>(count) * sizeof(float));
      return 0;
    case Dtype::kBfloat16:
      return round_bfloat16(values, count, reinterpret_cast<std::uint16_t*>(to));
    case Dtype::kFloat16:
      return round_float16(values, count, reinterpret_cast<std::uint16_t*>(to));
  }
  return 0;
}

}  // namespace shardam
