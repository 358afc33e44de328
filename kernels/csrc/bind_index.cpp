// Python classes for the row indexes and the arena.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>

#include <optional>
#include <tuple>

#include "arena.h"
#include "array_index.h"
#include "arrays.h"
#include "bindings.h"
#include "hash_index.h"

namespace shardam {
namespace {

template <class Index>
std::int64_t lookup(const Index& index, Ids row_ids, OutIds out_slots) {
  require_equal("out_slots", out_slots.size(), "row_ids", row_ids.size());
  const MaybeReleaseGil release(row_ids.nbytes());
  return index.lookup(row_ids.data(), static_cast<std::int64_t>(row_ids.size()), out_slots.data());
}

template <class Index>
void reserve(Index& index, std::int64_t num_new) {
  if (num_new < 0) throw std::invalid_argument("num_new must not be negative, got " + std::to_string(num_new));
  nb::gil_scoped_release release;
  index.reserve(num_new);
}

template <class Index>
std::int64_t insert(Index& index, Ids row_ids, OutIds out_slots, Array1<std::uint8_t> out_is_new) {
  require_equal("out_slots", out_slots.size(), "row_ids", row_ids.size());
  require_equal("out_is_new", out_is_new.size(), "row_ids", row_ids.size());
  const MaybeReleaseGil release(row_ids.nbytes());
  return index.insert(row_ids.data(), static_cast<std::int64_t>(row_ids.size()), out_slots.data(), out_is_new.data());
}

template <class Index>
std::int64_t remove(Index& index, Ids row_ids, OutIds out_slots) {
  require_equal("out_slots", out_slots.size(), "row_ids", row_ids.size());
  nb::gil_scoped_release release;
  return index.remove(row_ids.data(), static_cast<std::int64_t>(row_ids.size()), out_slots.data());
}

using ScanResult = std::tuple<OutIds, OutIds, std::optional<std::uint64_t>>;

template <class Index>
ScanResult scan(const Index& index, std::uint64_t from_key, std::int64_t max_rows) {
  if (max_rows < 1) throw std::invalid_argument("max_rows must be at least 1, got " + std::to_string(max_rows));
  ScanPage page;
  {
    nb::gil_scoped_release release;
    page = index.scan(from_key, max_rows);
  }
  const std::optional<std::uint64_t> next_key = page.more ? std::optional(page.next_key) : std::nullopt;
  return {to_array(std::move(page.row_ids)), to_array(std::move(page.slots)), next_key};
}

template <class Index>
nb::class_<Index> bind_index(nb::module_& module, const char* name, const char* doc) {
  return nb::class_<Index>(module, name, doc)
      .def("__len__", &Index::num_rows, "Number of rows.")
      .def_prop_ro("num_slots", &Index::num_slots, "One more than the largest slot ever given.")
      .def_prop_ro("memory_bytes", &Index::memory_bytes, "Memory of the index in bytes.")
      .def("lookup", &lookup<Index>, exact("row_ids"), exact("out_slots"),
           "Writes slots, -1 if absent; returns how many exist.")
      .def("reserve", &reserve<Index>, nb::arg("num_new"), "Makes room so that inserting num_new new ids cannot fail.")
      .def("insert", &insert<Index>, exact("row_ids"), exact("out_slots"), exact("out_is_new"),
           "Writes slots, giving one to each new id; returns the number of new rows.")
      .def("remove", &remove<Index>, exact("row_ids"), exact("out_slots"),
           "Removes rows, writes the slots they had, -1 if absent; returns how many were removed.")
      .def("scan", &scan<Index>, nb::arg("from_key"), nb::arg("max_rows"),
           "Returns (row_ids, slots, next_key): rows from from_key on in the index's order; next_key is None at the end.");
}

void create_array_index(ArrayIndex* self, std::int64_t num_embeddings) {
  if (num_embeddings < 1) {
    throw std::invalid_argument("num_embeddings must be at least 1, got " + std::to_string(num_embeddings));
  }
  new (self) ArrayIndex(num_embeddings);
}

void create_arena(Arena* self, std::int64_t stride_bytes) {
  if (stride_bytes < kUnitBytes || stride_bytes % kUnitBytes != 0) {
    throw std::invalid_argument("stride_bytes must be a multiple of 16, got " + std::to_string(stride_bytes));
  }
  new (self) Arena(stride_bytes);
}

void reserve_slots(Arena& arena, std::int64_t num_slots) {
  if (num_slots < 0) throw std::invalid_argument("num_slots must not be negative, got " + std::to_string(num_slots));
  nb::gil_scoped_release release;
  arena.reserve(num_slots);
}

// Memory of the process's own, not of its allocator, which may be told to keep and reuse what is given back.
Array1<std::uint8_t> zeroed_memory(std::size_t size_bytes) {
  auto* memory = new ZeroedMemory(size_bytes, /*large_pages=*/true);
  nb::capsule owner(memory, [](void* pointer) noexcept { delete static_cast<ZeroedMemory*>(pointer); });
  return Array1<std::uint8_t>(memory->as<std::uint8_t>(), {size_bytes}, owner);
}

// A view, so that tests see padding bytes, too; it keeps the arena alive.
Array1<std::uint8_t> view_record(nb::handle_t<Arena> self, std::int64_t slot) {
  const Arena& arena = nb::cast<const Arena&>(self);
  arena.check(&slot, 1, 0);
  return Array1<std::uint8_t>(arena.record(slot), {static_cast<std::size_t>(arena.stride_bytes())}, self);
}

}  // namespace

void bind_indexes(nb::module_& module) {
  bind_index<HashIndex>(module, "HashIndex", "Any int64 id -> slot, in the order of mix64(id).")
      .def(nb::init<>())
      .def("spread", &HashIndex::spread, nb::call_guard<nb::gil_scoped_release>(),
           "Spreads the rows that are there evenly: searches are quick again after many came in the index's order.");
  bind_index<ArrayIndex>(module, "ArrayIndex", "Ids 0 to num_embeddings - 1 -> slot, in the order of the id.")
      .def("__init__", &create_array_index, nb::arg("num_embeddings"))
      .def_prop_ro("num_embeddings", &ArrayIndex::num_embeddings, "Number of possible ids.");
  module.def("zeroed_memory", &zeroed_memory, nb::arg("size_bytes"),
             "Returns zeros that are not resident before they are written.");
  nb::class_<Arena>(module, "Arena",
                    "Records of one stride in native memory; a record never moves, untouched memory is not resident.")
      .def("__init__", &create_arena, nb::arg("stride_bytes"))
      .def_prop_ro("stride_bytes", &Arena::stride_bytes, "Distance from one record to the next.")
      .def_prop_ro("num_slots", &Arena::num_slots, "Number of records there is room for.")
      .def_prop_ro("memory_bytes", &Arena::memory_bytes, "Address space in bytes; pages never written are not resident.")
      .def("reserve", &reserve_slots, nb::arg("num_slots"),
           "Makes room for slots 0 to num_slots - 1; MemoryError if there is none, and nothing has changed.")
      .def("view_record", &view_record, nb::arg("slot"), "Returns the bytes of a record, writable, uint8 [stride_bytes].");
}

}  // namespace shardam
