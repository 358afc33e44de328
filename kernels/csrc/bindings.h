// The parts of the Python module.
#pragma once

#include <nanobind/nanobind.h>

namespace shardam {

void bind_indexes(nanobind::module_& module);
void bind_kernels(nanobind::module_& module);
void bind_steps(nanobind::module_& module);
void bind_sums(nanobind::module_& module);
void bind_worker(nanobind::module_& module);

}  // namespace shardam
