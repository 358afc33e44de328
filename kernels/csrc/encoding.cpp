#include "encoding.h"

namespace shardam {
namespace {

constexpr std::size_t kMaxFieldBytes = 11;   // a tag, and a varint of 64 bits
constexpr std::size_t kMessageHeadBytes = 2;  // a tag, and a length

std::uint8_t* write_field(const Column& column, std::uint64_t value, std::uint8_t* at) {
  *at++ = column.tag;
  if ((column.tag & 7) == kFixed64) {
    for (int shift = 0; shift < 64; shift += 8) *at++ = static_cast<std::uint8_t>(value >> shift);
    return at;
  }
  for (; value > 0x7F; value >>= 7) *at++ = static_cast<std::uint8_t>(value | 0x80);
  *at++ = static_cast<std::uint8_t>(value);
  return at;
}

}  // namespace

std::vector<std::uint8_t> encode_messages(std::uint8_t field, const std::vector<Column>& columns, std::size_t num_rows) {
  std::vector<std::uint8_t> encoded(num_rows * (kMessageHeadBytes + kMaxFieldBytes * columns.size()));
  std::uint8_t* at = encoded.data();
  for (std::size_t row = 0; row < num_rows; ++row) {
    std::uint8_t* const head = at;
    at += kMessageHeadBytes;
    for (const Column& column : columns) {
      if (column.values[row] != 0) at = write_field(column, column.values[row], at);
    }
    head[0] = static_cast<std::uint8_t>(field << 3 | kLengthDelimited);
    head[1] = static_cast<std::uint8_t>(at - head - kMessageHeadBytes);
  }
  encoded.resize(static_cast<std::size_t>(at - encoded.data()));
  return encoded;
}

}  // namespace shardam
