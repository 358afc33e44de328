#include <nanobind/nanobind.h>

#include "bindings.h"

NB_MODULE(_native, module) {
  module.doc() = "Native row indexes, arenas and kernels; use shardam_kernels.native.";
  // A server keeps its tables until its process ends; nanobind would report each of them as leaked, as if something were wrong.
  nanobind::set_leak_warnings(false);
  shardam::bind_indexes(module);
  shardam::bind_kernels(module);
  shardam::bind_steps(module);
  shardam::bind_sums(module);
  shardam::bind_worker(module);
}
