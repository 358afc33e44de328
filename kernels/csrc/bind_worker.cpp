// Python functions for what lies between arrays and messages. shardam_kernels/native.py is their typed front.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>
#include <tuple>
#include <utility>

#include "arrays.h"
#include "bindings.h"
#include "dispatch.h"
#include "distinct.h"
#include "encoding.h"
#include "merge.h"

namespace shardam {
namespace {

constexpr std::int64_t kMaxShards = 4096;

void require_shards(std::int64_t num_shards) {
  if (num_shards < 1 || num_shards > kMaxShards) {
    throw std::invalid_argument("num_shards must be 1 to 4096, got " + std::to_string(num_shards));
  }
}

std::tuple<OutIds, OutIds, OutIds> distinct(Ids row_ids, std::int64_t num_shards) {
  require_shards(num_shards);
  if (row_ids.size() > std::size_t{std::numeric_limits<std::int32_t>::max()}) {
    throw std::invalid_argument("at most 2^31 - 1 ids at once, got " + std::to_string(row_ids.size()));
  }
  std::vector<std::int64_t> places(row_ids.size());
  DistinctIds found;
  {
    const MaybeReleaseGil release(row_ids.nbytes());
    found = distinct_ids(row_ids.data(), static_cast<std::int64_t>(row_ids.size()), num_shards, places.data());
  }
  return {to_array(std::move(found.row_ids)), to_array(std::move(places)), to_array(std::move(found.ends))};
}

std::tuple<std::optional<OutIds>, OutIds> split(Ids row_ids, std::int64_t num_shards) {
  require_shards(num_shards);
  ShardSplit found;
  {
    const MaybeReleaseGil release(row_ids.nbytes());
    found = split_by_shard(row_ids.data(), static_cast<std::int64_t>(row_ids.size()), num_shards);
  }
  std::optional<OutIds> order;
  if (!found.order.empty()) order = to_array(std::move(found.order));
  return {std::move(order), to_array(std::move(found.ends))};
}

// False also where only exact sums can tell.
bool is_merged(Ids row_ids, Rows2 gradients, float unscale) {
  require_equal("gradients", gradients.shape(0), "row_ids", row_ids.size());
  if (row_ids.size() > std::size_t{std::numeric_limits<std::int32_t>::max()}) return false;
  const MaybeReleaseGil release(gradients.nbytes());
  const auto count = static_cast<std::int64_t>(row_ids.size());
  if (!all_distinct(row_ids.data(), count)) return false;
  const auto num_values = static_cast<std::int64_t>(gradients.size());
  return sums_stay_below_limit(largest_magnitude(gradients.data(), num_values, 1), 1, unscale);
}

SHARDAM_CLONES bool all_in_range(const std::int64_t* row_ids, std::size_t count, std::uint64_t bound) {
  std::uint64_t outside = 0;
  for (std::size_t i = 0; i < count; ++i) outside |= static_cast<std::uint64_t>(row_ids[i]) >= bound ? 1 : 0;
  return outside == 0;
}

bool all_below(Ids row_ids, std::int64_t bound) {
  const MaybeReleaseGil release(row_ids.nbytes());
  return all_in_range(row_ids.data(), row_ids.size(), static_cast<std::uint64_t>(std::max<std::int64_t>(bound, 0)));
}

using OutBytes = Array1<std::uint8_t>;
using OutFloats = Array1<float>;

// The same floats, to be written to from now on: a part of a bytes object that nobody but its owner has seen.
OutFloats writable(nb::object values) {
  const auto floats = nb::cast<Array1<const float>>(values, /* convert */ false);
  return OutFloats(const_cast<float*>(floats.data()), {floats.size()}, values);
}

// A bytes object of prefixes and payloads, and each payload as an array into which it is yet to be written. Python's own API
// allows to write into a bytes object that nobody else has seen.
std::tuple<nb::bytes, std::vector<OutBytes>> new_message(const std::vector<nb::bytes>& prefixes,
                                                         const std::vector<std::size_t>& sizes) {
  require_equal("sizes", sizes.size(), "prefixes", prefixes.size());
  std::size_t total = 0;
  for (std::size_t i = 0; i < sizes.size(); ++i) total += prefixes[i].size() + sizes[i];
  PyObject* raw = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(total));
  if (raw == nullptr) throw nb::python_error();
  nb::bytes message = nb::steal<nb::bytes>(raw);
  char* at = PyBytes_AS_STRING(raw);
  std::vector<OutBytes> payloads;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    std::memcpy(at, prefixes[i].c_str(), prefixes[i].size());
    at += prefixes[i].size();
    payloads.emplace_back(reinterpret_cast<std::uint8_t*>(at), std::initializer_list<std::size_t>{sizes[i]}, message);
    at += sizes[i];
  }
  return {std::move(message), std::move(payloads)};
}

// Field numbers and wire types are what is encoded in one byte.
nb::bytes encode(unsigned field, const std::vector<std::pair<unsigned, Array1<const std::uint64_t>>>& columns) {
  if (field < 1 || field > 15) throw std::invalid_argument("field must be 1 to 15, got " + std::to_string(field));
  if (columns.empty() || columns.size() > kMaxColumns) {
    throw std::invalid_argument("a message has 1 to 11 columns here, got " + std::to_string(columns.size()));
  }
  const std::size_t num_rows = columns.front().second.size();
  std::vector<Column> known;
  for (const auto& [tag, values] : columns) {
    if (tag < 8 || tag > 0x7F || (tag & 7) > kFixed64) {
      throw std::invalid_argument("a column's tag is of a varint or fixed64 of field 1 to 15, got " + std::to_string(tag));
    }
    require_equal("a column", values.size(), "the first one", num_rows);
    known.push_back({static_cast<std::uint8_t>(tag), values.data()});
  }
  const std::vector<std::uint8_t> encoded = encode_messages(static_cast<std::uint8_t>(field), known, num_rows);
  return nb::bytes(encoded.data(), encoded.size());
}

}  // namespace

void bind_worker(nb::module_& module) {
  module.def("distinct_ids", &distinct, exact("row_ids"), nb::arg("num_shards"), "Returns (row_ids, places, ends).");
  module.def("all_below", &all_below, exact("row_ids"), nb::arg("bound"), "Returns whether all ids are 0 to bound - 1.");
  module.def("split_by_shard", &split, exact("row_ids"), nb::arg("num_shards"),
             "Returns (order, ends); order is None if the ids lie by shard.");
  module.def("is_merged", &is_merged, exact("row_ids"), exact("gradients"), nb::arg("unscale"),
             "Returns whether ids are distinct and all values so small that no shard refuses them.");
  module.def("writable", &writable, nb::arg("values"), "Returns the same floats, writable.");
  module.def("new_message", &new_message, nb::arg("prefixes"), nb::arg("sizes"),
             "Returns a bytes object and its payloads, uninitialised and writable.");
  module.def("encode_messages", &encode, nb::arg("field"), exact("columns"),
             "Returns a repeated field of messages, as protobuf encodes it.");
}

}  // namespace shardam
