// Splits work over threads that live as long as the call.
#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>
#include <thread>

#include "float_mode.h"

namespace shardam {

constexpr int kMaxThreads = 64;  // more than memory bandwidth can use, and a bound on the threads kept on the stack

// Runs part(0) .. part(num_parts - 1), each once, the last in the calling thread. A part must not throw. Where the system
// gives no more threads the calling thread runs what is left: the result is the same.
template <class Part>
void run_parts(int num_parts, const Part& part) {
  std::thread threads[kMaxThreads];
  int started = 0;
  try {
    for (; started < num_parts - 1; ++started) {
      threads[started] = std::thread([&part, started] {
        ScopedFloatMode mode;
        part(started);
      });
    }
  } catch (const std::exception&) {
  }
  {
    ScopedFloatMode mode;
    for (int index = started; index < num_parts; ++index) part(index);
  }
  for (int index = 0; index < started; ++index) threads[index].join();
}

// As many threads as asked for, but no more than have min_work (in any unit) to do.
inline int useful_threads(int num_threads, std::int64_t work, std::int64_t min_work) {
  const std::int64_t useful = std::max<std::int64_t>(1, work / min_work);
  return static_cast<int>(std::min<std::int64_t>({num_threads, useful, kMaxThreads}));
}

constexpr std::int64_t kMinBytesPerThread = 1 << 17;  // 128 KiB take about as long as starting a thread, 20 us

}  // namespace shardam
