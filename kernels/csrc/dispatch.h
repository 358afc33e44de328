// One macro for SIMD dispatch. A function marked SHARDAM_CLONES is compiled for several instruction sets and the loader picks
// one; every clone gives the same bits, because each operation is rounded by itself (-ffp-contract=off, no fast-math).
#pragma once

#include <cstdlib>  // defines __GLIBC__

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && !defined(SHARDAM_NO_CLONES)
#define SHARDAM_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define SHARDAM_CLONES
#endif

// What a clone calls must become part of it, or it would run at the default instruction set.
#define SHARDAM_INLINE inline __attribute__((always_inline))
