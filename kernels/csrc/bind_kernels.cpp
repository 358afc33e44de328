// Python functions for the kernels. shardam_kernels/native.py is their typed front and documents them.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>

#include "adam.h"
#include "arrays.h"
#include "bindings.h"
#include "array_index.h"
#include "hash_index.h"
#include "initial.h"
#include "merge.h"
#include "rows.h"
#include "runs.h"
#include "slots.h"

namespace shardam {
namespace {

std::int64_t length(const Ids& ids) { return static_cast<std::int64_t>(ids.size()); }

Dtype dtype_of(const std::string& name) {
  if (name == "float32") return Dtype::kFloat32;
  if (name == "bfloat16") return Dtype::kBfloat16;
  if (name == "float16") return Dtype::kFloat16;
  throw std::invalid_argument("unknown dtype '" + name + "'; use float32, bfloat16 or float16");
}

void create_layout(RecordLayout* self, const std::string& dtype, std::int64_t dim, std::int64_t weight, std::int64_t exp_avg,
                   std::int64_t exp_avg_sq) {
  new (self) RecordLayout{dtype_of(dtype), dim, weight, exp_avg, exp_avg_sq};
}

// The Rounding of a step; holds the arrays that it points to.
struct RoundingHolder {
  RoundingHolder(std::uint64_t table_seed, Ids ids, Ids row_steps)
      : row_ids(std::move(ids)), steps(std::move(row_steps)), rounding{table_seed, row_ids.data(), {0, steps.data()}} {
    require_equal("steps", steps.size(), "row_ids", row_ids.size());
  }
  Ids row_ids;
  Ids steps;
  Rounding rounding;
};

// A folded initializer; holds the arrays that InitialRows points to.
struct InitialRowsHolder {
  Array1<const float> a;
  Array1<const float> b;
  InitialRows rows;
};

void create_initial_rows(InitialRowsHolder* self, const std::string& kind, Array1<const float> a, Array1<const float> b,
                         std::uint64_t table_seed, std::optional<std::int64_t> padding_idx) {
  InitKind known;
  if (kind == "constant") {
    known = InitKind::kConstant;
  } else if (kind == "uniform") {
    known = InitKind::kUniform;
  } else if (kind == "normal") {
    known = InitKind::kNormal;
  } else {
    throw std::invalid_argument("unknown kind of initializer '" + kind + "'; use constant, uniform or normal");
  }
  const std::size_t expected = known == InitKind::kNormal ? 4096 : 1;
  require_equal("a", a.size(), "its kind", expected);
  require_equal("b", b.size(), "its kind", expected);
  const InitialRows rows{known, a.data(), b.data(), table_seed, padding_idx};
  new (self) InitialRowsHolder{std::move(a), std::move(b), rows};
}

std::tuple<OutIds, OutRows2, OutIds> merge_gradients(Ids row_ids, Rows2 gradients, float unscale, float divisor,
                                                     int num_threads) {
  const std::int64_t dim = require_gradients(row_ids, gradients);
  require_threads(num_threads);
  Groups groups;
  std::unique_ptr<float[]> merged;
  std::vector<std::int64_t> bad_rows;
  {
    nb::gil_scoped_release release;
    groups = group_ids(row_ids.data(), length(row_ids));
    merged.reset(new float[groups.row_ids.size() * static_cast<std::size_t>(dim)]);
    bad_rows = merge({groups, gradients.data(), dim, unscale, divisor, merged.get()}, num_threads);
  }
  nb::capsule owner(merged.get(), [](void* pointer) noexcept { delete[] static_cast<float*>(pointer); });
  OutRows2 sums(merged.release(), {groups.row_ids.size(), static_cast<std::size_t>(dim)}, owner);
  return {to_array(std::move(groups.row_ids)), sums, to_array(std::move(bad_rows))};
}

using OutPositions = Array1<std::int32_t>;

std::tuple<OutIds, OutPositions, OutPositions, OutIds> group_gradients(Ids row_ids, Rows2 gradients, float unscale,
                                                                       int num_threads) {
  const std::int64_t dim = require_gradients(row_ids, gradients);
  require_threads(num_threads);
  Runs runs;
  {
    nb::gil_scoped_release release;
    runs = group_runs({row_ids.data(), gradients.data(), length(row_ids), dim, unscale}, num_threads);
  }
  return {to_array(std::move(runs.row_ids)), to_array(std::move(runs.starts)), to_array(std::move(runs.order)),
          to_array(std::move(runs.bad_rows))};
}

void require_room(const Arena& arena, std::int64_t num_slots) {
  if (num_slots <= arena.num_slots()) return;
  throw std::out_of_range("the index has given " + std::to_string(num_slots) + " slots, the arena has room for " +
                          std::to_string(arena.num_slots()) + "; reserve more slots first");
}

std::int64_t initialize(const Arena& arena, const RecordLayout& layout, Ids slots, Ids row_ids,
                        const InitialRowsHolder& initial) {
  require_equal("row_ids", row_ids.size(), "slots", slots.size());
  nb::gil_scoped_release release;
  arena.check(slots.data(), length(slots), 0);
  return initialize_rows(arena, layout, initial.rows, slots.data(), row_ids.data(), length(slots));
}

void gather(const Arena& arena, const RecordLayout& layout, Ids slots, Ids row_ids, const InitialRowsHolder& initial,
            OutRows2 out, int num_threads) {
  require_equal("row_ids", row_ids.size(), "slots", slots.size());
  require_equal("out", out.shape(0), "slots", slots.size());
  require_dim("out", out.shape(1), layout.dim);
  require_threads(num_threads);
  nb::gil_scoped_release release;
  arena.check(slots.data(), length(slots), kNoSlot);
  gather_weights({arena, layout, initial.rows, row_ids.data(), length(slots), out.data()}, slots.data(), num_threads);
}

template <class Index>
void gather_by_id(const Arena& arena, const RecordLayout& layout, const Index& index, Ids row_ids,
                  const InitialRowsHolder& initial, OutRows2 out, int num_threads) {
  require_equal("out", out.shape(0), "row_ids", row_ids.size());
  require_dim("out", out.shape(1), layout.dim);
  require_threads(num_threads);
  require_room(arena, index.num_slots());
  const MaybeReleaseGil release(out.nbytes());
  gather_rows({arena, layout, initial.rows, row_ids.data(), length(row_ids), out.data()}, index, num_threads);
}

std::int64_t update(const Arena& arena, const RecordLayout& layout, Ids slots, Rows2 gradients, const AdamFactors& factors,
                    Array1<const float> step_factors, const RoundingHolder* rounding, int num_threads) {
  require_equal("gradients", gradients.shape(0), "slots", slots.size());
  require_dim("gradients", gradients.shape(1), layout.dim);
  require_equal("step_factors", step_factors.size(), "slots", slots.size());
  if (layout.dtype != Dtype::kFloat32) {
    if (rounding == nullptr) throw std::invalid_argument("weights below float32 need a rounding");
    require_equal("rounding.row_ids", rounding->row_ids.size(), "slots", slots.size());
  }
  require_threads(num_threads);
  const Rounding drawn_from = rounding == nullptr ? Rounding{} : rounding->rounding;
  const StepGradients merged{gradients.data(), nullptr, nullptr, layout.dim, 1.0f, 1.0f};
  nb::gil_scoped_release release;
  arena.check(slots.data(), length(slots), 0);
  const PerRow<float> factor_of{0.0f, step_factors.data()};
  return adam_update({arena, layout, factors, slots.data(), merged, factor_of, drawn_from, length(slots), nullptr, {}},
                     num_threads);
}

ComponentPlace place_in(const Arena& arena, std::int64_t dim, std::int64_t offset_bytes, const std::string& dtype) {
  const ComponentPlace place{dim, offset_bytes, dtype_of(dtype)};
  if (dim < 1 || offset_bytes < 0 || offset_bytes + dim * item_bytes(place.dtype) > arena.stride_bytes()) {
    throw std::invalid_argument("a component of dim " + std::to_string(dim) + " at byte " + std::to_string(offset_bytes) +
                                " does not fit a record of " + std::to_string(arena.stride_bytes()) + " bytes");
  }
  return place;
}

void read(const Arena& arena, std::int64_t dim, std::int64_t offset_bytes, const std::string& dtype, Ids slots, OutRows2 out) {
  const ComponentPlace place = place_in(arena, dim, offset_bytes, dtype);
  require_equal("out", out.shape(0), "slots", slots.size());
  require_dim("out", out.shape(1), dim);
  nb::gil_scoped_release release;
  arena.check(slots.data(), length(slots), kNoSlot);
  read_component(arena, place, slots.data(), length(slots), out.data());
}

std::int64_t write(const Arena& arena, std::int64_t dim, std::int64_t offset_bytes, const std::string& dtype, Ids slots,
                   Rows2 values) {
  const ComponentPlace place = place_in(arena, dim, offset_bytes, dtype);
  require_equal("values", values.shape(0), "slots", slots.size());
  require_dim("values", values.shape(1), dim);
  nb::gil_scoped_release release;
  arena.check(slots.data(), length(slots), 0);
  return write_component(arena, place, slots.data(), length(slots), values.data());
}

template <class Index>
void bind_gather(nb::module_& module) {
  module.def("gather_rows", &gather_by_id<Index>, nb::arg("arena"), nb::arg("layout"), nb::arg("index"), exact("row_ids"),
             nb::arg("initial"), exact("out"), nb::arg("num_threads"), "Writes the weights of rows as an index has them.");
}

void bind_values(nb::module_& module) {
  nb::class_<RecordLayout>(module, "RecordLayout", "The weight's dtype, dim, and where a record has its components, in bytes.")
      .def("__init__", &create_layout, nb::arg("dtype"), nb::arg("dim"), nb::arg("weight"), nb::arg("exp_avg"),
           nb::arg("exp_avg_sq"));
  nb::class_<RoundingHolder>(module, "Rounding", "What the stochastic rounding of a step's weights is drawn from.")
      .def(nb::init<std::uint64_t, Ids, Ids>(), nb::arg("table_seed"), exact("row_ids"), exact("steps"));
  nb::class_<AdamFactors>(module, "AdamFactors", "The factors of one step that all its rows share.")
      .def(nb::init<float, float, float, float, float, bool, bool>(), nb::arg("c1"), nb::arg("c2"), nb::arg("d"),
           nb::arg("eps"), nb::arg("weight_decay"), nb::arg("maximize"), nb::arg("decoupled"));
  nb::class_<InitialRowsHolder>(module, "InitialRows", "A folded initializer with a table's seed and padding row.")
      .def("__init__", &create_initial_rows, nb::arg("kind"), exact("a"), exact("b"), nb::arg("table_seed"),
           nb::arg("padding_idx").none());
}

}  // namespace

void bind_kernels(nb::module_& module) {
  bind_values(module);
  module.def("merge_gradients", &merge_gradients, exact("row_ids"), exact("gradients"), nb::arg("unscale"), nb::arg("divisor"),
             nb::arg("num_threads"), "Returns (row_ids, gradients, bad_rows), merged by id.");
  module.def("group_gradients", &group_gradients, exact("row_ids"), exact("gradients"), nb::arg("unscale"),
             nb::arg("num_threads"), "Returns (row_ids, starts, order, bad_rows), grouped by id.");
  module.def("initialize", &initialize, nb::arg("arena"), nb::arg("layout"), exact("slots"), exact("row_ids"),
             nb::arg("initial"), "Writes new records; returns saturated weights.");
  module.def("gather_weights", &gather, nb::arg("arena"), nb::arg("layout"), exact("slots"), exact("row_ids"),
             nb::arg("initial"), exact("out"), nb::arg("num_threads"), "Writes the weights of rows, existing or not.");
  bind_gather<HashIndex>(module);
  bind_gather<ArrayIndex>(module);
  module.def("adam_update", &update, nb::arg("arena"), nb::arg("layout"), exact("slots"), exact("gradients"),
             nb::arg("factors"), exact("step_factors"), nb::arg("rounding").none(), nb::arg("num_threads"),
             "Applies one step; returns saturated weights.");
  module.def("read_component", &read, nb::arg("arena"), nb::arg("dim"), nb::arg("offset_bytes"), nb::arg("dtype"),
             exact("slots"), exact("out"), "Writes one component of rows to out, zeros where a slot is -1.");
  module.def("write_component", &write, nb::arg("arena"), nb::arg("dim"), nb::arg("offset_bytes"), nb::arg("dtype"),
             exact("slots"), exact("values"), "Writes values to one component of rows; returns saturated values.");
}

}  // namespace shardam
