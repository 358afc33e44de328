// The Python function that sums a lookup's gradients. shardam_kernels/native.py is its typed front.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include <optional>

#include "arrays.h"
#include "bindings.h"
#include "sums.h"

namespace shardam {
namespace {

using StridedRows = nb::ndarray<nb::numpy, const float, nb::ndim<2>, nb::device::cpu>;

void sum_places(StridedRows gradients, Ids places, std::optional<std::int64_t> skipped, OutRows2 out) {
  require_equal("places", places.size(), "gradients", gradients.shape(0));
  if (gradients.shape(1) != out.shape(1)) {
    throw std::invalid_argument("gradients have " + std::to_string(gradients.shape(1)) + " columns, out has " +
                                std::to_string(out.shape(1)));
  }
  if (gradients.size() > 0 && gradients.shape(1) > 1 && gradients.stride(1) != 1) {
    throw std::invalid_argument("each row of gradients must be contiguous; hand in np.ascontiguousarray(gradients)");
  }
  const auto num_sums = static_cast<std::int64_t>(out.shape(0));
  for (std::size_t i = 0; i < places.size(); ++i) {
    if (places.data()[i] >= 0 && places.data()[i] < num_sums) continue;
    throw std::out_of_range("place " + std::to_string(places.data()[i]) + " is none of the " + std::to_string(num_sums) +
                            " rows of out");
  }
  nb::gil_scoped_release release;
  sum_by_place({gradients.data(), static_cast<std::int64_t>(gradients.shape(0)), static_cast<std::int64_t>(out.shape(1)),
                gradients.stride(0), places.data(), skipped.value_or(-1), num_sums, out.data()});
}

}  // namespace

void bind_sums(nb::module_& module) {
  module.def("sum_places", &sum_places, exact("gradients"), exact("places"), nb::arg("skipped").none(), exact("out"),
             "Writes the sum of the gradients of each place.");
}

}  // namespace shardam
