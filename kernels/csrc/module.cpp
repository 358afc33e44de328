#include <nanobind/nanobind.h>

#include "bindings.h"

NB_MODULE(_native, module) {
  module.doc() = "Native row indexes, arenas and kernels; use shardam_kernels.native.";
  shardam::bind_indexes(module);
  shardam::bind_kernels(module);
}
