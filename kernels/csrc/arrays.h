// NumPy arrays as the bindings take and give them.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace shardam {

namespace nb = nanobind;

template <class T>
using Array1 = nb::ndarray<nb::numpy, T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Array2 = nb::ndarray<nb::numpy, T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

using Ids = Array1<const std::int64_t>;
using OutIds = Array1<std::int64_t>;
using Rows2 = Array2<const float>;
using OutRows2 = Array2<float>;

// nanobind would otherwise copy an array of another dtype or order, and what is written to the copy would be lost.
inline auto exact(const char* name) { return nb::arg(name).noconvert(); }

inline void require_equal(const char* what, std::size_t got, const char* than, std::size_t expected) {
  if (got == expected) return;
  throw std::invalid_argument(std::string(what) + " has length " + std::to_string(got) + ", " + than + " has " +
                              std::to_string(expected) + "; give as many of both");
}

inline void require_dim(const char* what, std::size_t got, std::int64_t dim) {
  if (static_cast<std::int64_t>(got) == dim) return;
  throw std::invalid_argument(std::string(what) + " has " + std::to_string(got) + " columns, the records have dim " +
                              std::to_string(dim));
}

inline int require_threads(int num_threads) {
  if (num_threads < 1) throw std::invalid_argument("num_threads must be at least 1, got " + std::to_string(num_threads));
  return num_threads;
}

// Checks the gradients of a step and returns their dim.
inline std::int64_t require_gradients(const Ids& row_ids, const Rows2& gradients) {
  require_equal("gradients", gradients.shape(0), "row_ids", row_ids.size());
  if (row_ids.size() > std::size_t{std::numeric_limits<std::int32_t>::max()}) {
    throw std::invalid_argument("a step names at most 2^31 - 1 ids, got " + std::to_string(row_ids.size()));
  }
  const auto dim = static_cast<std::int64_t>(gradients.shape(1));
  if (dim == 0 && row_ids.size() > 0) {
    throw std::invalid_argument("gradients of " + std::to_string(row_ids.size()) + " ids have no columns; give [N, dim]");
  }
  return dim;
}

// Lets other Python threads run meanwhile, if there is enough to do: to get the lock back may take as long as the interpreter
// lets another thread go on, 5 ms, and costs more than little work takes.
class MaybeReleaseGil {
 public:
  explicit MaybeReleaseGil(std::size_t num_bytes) {
    if (num_bytes >= kWorthReleasing) release_.emplace();
  }

 private:
  static constexpr std::size_t kWorthReleasing = 1 << 14;  // bytes that are read or written, in about 2 us
  std::optional<nb::gil_scoped_release> release_;
};

// Gives a vector's memory to a new array.
template <class T>
Array1<T> to_array(std::vector<T> values) {
  auto* kept = new std::vector<T>(std::move(values));
  nb::capsule owner(kept, [](void* pointer) noexcept { delete static_cast<std::vector<T>*>(pointer); });
  return Array1<T>(kept->data(), {kept->size()}, owner);
}

}  // namespace shardam
