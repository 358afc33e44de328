// The weights of rows before their first push: a function of table seed, id and column.
#pragma once

#include <cstdint>
#include <optional>

namespace shardam {

enum class InitKind { kConstant, kUniform, kNormal };

// An initializer as initializers.py folds it: every element is a + b * x, x from the element's hash.
struct InitialRows {
  InitKind kind;
  const float* a;  // [1], normal [4096]
  const float* b;
  std::uint64_t table_seed;
  std::optional<std::int64_t> padding_idx;
};

// Writes the weight, float32 [dim], with which a row starts.
void write_initial_row(const InitialRows& initial, std::int64_t row_id, std::int64_t dim, float* out);

}  // namespace shardam
