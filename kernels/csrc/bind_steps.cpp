// Python class for the rows of a step. shardam_kernels/native.py is its typed front and documents it.
#include <nanobind/stl/optional.h>

#include <optional>

#include "adam.h"
#include "array_index.h"
#include "arrays.h"
#include "bindings.h"
#include "hash_index.h"
#include "step_rows.h"

namespace shardam {
namespace {

// The rows of a step; holds the arrays that they point to.
struct StepRowsHolder {
  Ids row_ids;
  Rows2 gradients;
  StepRows rows;
  int num_threads;
};

template <class T>
using View1 = Array1<const T>;

template <class T>
View1<T> view_of(nb::handle_t<StepRowsHolder> self, const T* data, std::int64_t size) {
  return View1<T>(data, {static_cast<std::size_t>(size)}, self);
}

const StepRows& rows_of(nb::handle_t<StepRowsHolder> self) { return nb::cast<const StepRowsHolder&>(self).rows; }

void create_step_rows(StepRowsHolder* self, Ids row_ids, Rows2 gradients, float unscale, float divisor, int num_threads) {
  const std::int64_t dim = require_gradients(row_ids, gradients);
  require_threads(num_threads);
  const auto count = static_cast<std::int64_t>(row_ids.size());
  const auto make = [&] {
    const MaybeReleaseGil release(gradients.nbytes());
    return StepRows(row_ids.data(), gradients.data(), count, dim, unscale, divisor, num_threads);
  };
  StepRows rows = make();
  new (self) StepRowsHolder{std::move(row_ids), std::move(gradients), std::move(rows), num_threads};
}

View1<std::int64_t> row_ids_of(nb::handle_t<StepRowsHolder> self) {
  return view_of(self, rows_of(self).row_ids(), rows_of(self).num_rows());
}

View1<std::int64_t> slots_of(nb::handle_t<StepRowsHolder> self) {
  return view_of(self, rows_of(self).slots(), rows_of(self).slots() == nullptr ? 0 : rows_of(self).num_rows());
}

View1<std::int64_t> bad_rows_of(nb::handle_t<StepRowsHolder> self) {
  const std::vector<std::int64_t>& bad = rows_of(self).bad_rows();
  return view_of(self, bad.data(), static_cast<std::int64_t>(bad.size()));
}

template <class Index>
std::int64_t find(StepRowsHolder& self, const Index& index) {
  const MaybeReleaseGil release(static_cast<std::size_t>(self.rows.num_rows()) * sizeof(std::int64_t));
  return self.rows.find(index, self.num_threads);
}

template <class Index>
OutIds insert(StepRowsHolder& self, Index& index) {
  std::vector<std::int64_t> places;
  {
    const MaybeReleaseGil release(static_cast<std::size_t>(self.rows.num_rows()) * sizeof(std::int64_t));
    places = self.rows.insert(index);
  }
  return to_array(std::move(places));
}

using Touches = Array2<std::uint64_t>;

// Throws std::out_of_range unless there is a record, and a place in touches, for each slot.
void check_slots(const StepRows& rows, const Arena& arena, const std::optional<Touches>& touches) {
  if (rows.num_rows() > 0 && rows.slots() == nullptr) {
    throw std::invalid_argument("the rows of the step have no slots yet; find and insert them first");
  }
  arena.check(rows.slots(), rows.num_rows(), 0);
  if (!touches) return;
  const std::int64_t largest = largest_slot(rows.slots(), rows.num_rows());
  if (largest < static_cast<std::int64_t>(touches->shape(0))) return;
  throw std::out_of_range("touches has " + std::to_string(touches->shape(0)) + " rows, the step touches slot " +
                          std::to_string(largest));
}

std::int64_t update(const Arena& arena, const RecordLayout& layout, const StepRowsHolder& holder, const AdamFactors& factors,
                    float step_factor, std::optional<Array1<const float>> row_factors, std::uint64_t table_seed,
                    std::optional<Ids> row_steps, std::optional<Touches> touches, std::uint64_t change_number,
                    std::int64_t table_step, int num_threads) {
  const StepRows& rows = holder.rows;
  const auto num_rows = static_cast<std::size_t>(rows.num_rows());
  if (num_rows > 0) require_dim("gradients", static_cast<std::size_t>(rows.gradients().dim), layout.dim);
  if (row_factors) require_equal("row_factors", row_factors->size(), "the step", num_rows);
  if (row_steps) require_equal("row_steps", row_steps->size(), "the step", num_rows);
  if (touches) require_equal("a row of touches", touches->shape(1), "change number and step", 2);
  require_threads(num_threads);
  const MaybeReleaseGil release(num_rows * static_cast<std::size_t>(arena.stride_bytes()));
  check_slots(rows, arena, touches);
  static_assert(sizeof(Touch) == 2 * sizeof(std::uint64_t));
  const PerRow<float> factor_of{step_factor, row_factors ? row_factors->data() : nullptr};
  const Rounding rounding{table_seed, rows.row_ids(), {table_step, row_steps ? row_steps->data() : nullptr}};
  Touch* const touched = touches ? reinterpret_cast<Touch*>(touches->data()) : nullptr;
  return adam_update({arena, layout, factors, rows.slots(), rows.gradients(), factor_of, rounding, rows.num_rows(), touched,
                      {change_number, table_step}},
                     num_threads);
}

template <class Index, class Class>
void bind_index_calls(Class& rows) {
  rows.def("find", &find<Index>, nb::arg("index"), "Looks the rows up; returns how many are absent.")
      .def("insert", &insert<Index>, nb::arg("index"), "Gives slots to the absent rows; returns their positions.");
}

}  // namespace

void bind_steps(nb::module_& module) {
  nb::class_<StepRowsHolder> rows(module, "StepRows", "The rows of one step, each once, with its gradients and slot.");
  rows.def("__init__", &create_step_rows, exact("row_ids"), exact("gradients"), nb::arg("unscale"), nb::arg("divisor"),
           nb::arg("num_threads"))
      .def_prop_ro("num_rows", [](const StepRowsHolder& self) { return self.rows.num_rows(); }, "Number of distinct ids.")
      .def_prop_ro("num_absent", [](const StepRowsHolder& self) { return self.rows.num_absent(); },
                   "Rows without a slot, after find.")
      .def_prop_ro("row_ids", &row_ids_of, "The distinct ids, in order of first appearance.")
      .def_prop_ro("slots", &slots_of, "Slots as they were found and given; -1 for a row that has none.")
      .def_prop_ro("bad_rows", &bad_rows_of, "Positions of rows whose gradient must be refused, ascending.");
  bind_index_calls<HashIndex>(rows);
  bind_index_calls<ArrayIndex>(rows);
  module.def("update_rows", &update, nb::arg("arena"), nb::arg("layout"), nb::arg("rows"), nb::arg("factors"),
             nb::arg("step_factor"), exact("row_factors").none(), nb::arg("table_seed"), exact("row_steps").none(),
             exact("touches").none(), nb::arg("change_number"), nb::arg("table_step"), nb::arg("num_threads"),
             "Applies one step and notes what it touched; returns saturated weights.");
}

}  // namespace shardam
