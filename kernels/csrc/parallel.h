// Splits work over threads that are kept between calls.
#pragma once

#include <algorithm>
#include <cstdint>

#include "float_mode.h"

namespace shardam {

constexpr int kMaxThreads = 64;  // more than memory bandwidth can use

// Runs run(context, 0) .. run(context, num_parts - 1), each once, in the calling thread and up to num_threads - 1 kept ones,
// which take the parts as they come. Where the kept threads are busy with another call, or the system gives none, the calling
// thread runs what is left: the result is the same. num_parts < 2^20.
void run_on_threads(int num_threads, int num_parts, void (*run)(const void*, int), const void* context);

// The same of a callable, which must not throw.
template <class Part>
void run_parts(int num_threads, std::int64_t num_parts, const Part& part) {
  if (num_threads <= 1 || num_parts <= 1) {
    ScopedFloatMode mode;
    for (std::int64_t index = 0; index < num_parts; ++index) part(static_cast<int>(index));
    return;
  }
  run_on_threads(
      num_threads, static_cast<int>(num_parts),
      [](const void* context, int index) { (*static_cast<const Part*>(context))(index); }, &part);
}

// As many threads as asked for, but no more than have min_work (in any unit) to do.
inline int useful_threads(int num_threads, std::int64_t work, std::int64_t min_work) {
  const std::int64_t useful = std::max<std::int64_t>(1, work / min_work);
  return static_cast<int>(std::min<std::int64_t>({num_threads, useful, kMaxThreads}));
}

constexpr std::int64_t kMinBytesPerThread = 1 << 16;  // 64 KiB take about as long as waking a kept thread, 5 us
constexpr std::int64_t kPartsPerThread = 8;  // so that a thread that comes late, or has heavy parts, holds nobody up for long

// Into how many parts `count` items are to be split for so many threads, each of at least `least` items.
inline std::int64_t useful_parts(int num_threads, std::int64_t count, std::int64_t least) {
  if (num_threads == 1) return 1;
  return std::clamp<std::int64_t>(count / least, 1, num_threads * kPartsPerThread);
}

}  // namespace shardam
