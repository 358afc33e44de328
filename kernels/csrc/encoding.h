// Protobuf's encoding of many small messages of one kind, whose fields are columns of numbers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace shardam {

struct Column {
  std::uint8_t tag;  // field number, 1 to 15, and wire type: a varint, or eight bytes
  const std::uint64_t* values;
};

constexpr std::uint8_t kFixed64 = 1;  // wire types; 0 is a varint
constexpr std::uint8_t kLengthDelimited = 2;

// More columns could make a message of 128 bytes, whose length is longer than one byte.
constexpr std::size_t kMaxColumns = 11;

// Encodes each row as a message that is an element of repeated field `field`, 1 to 15; a zero is left out, as protobuf does.
std::vector<std::uint8_t> encode_messages(std::uint8_t field, const std::vector<Column>& columns, std::size_t num_rows);

}  // namespace shardam
