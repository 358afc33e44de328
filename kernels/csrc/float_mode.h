// Floating point as the contract wants it, whatever the calling thread has set: denormals kept, rounding to nearest even.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace shardam {

// Saves this thread's mode, clears flush-to-zero, denormals-are-zero and directed rounding, and restores on destruction.
class ScopedFloatMode {
 public:
  ScopedFloatMode() : saved_(read()) { write(saved_ & ~kCleared); }
  ~ScopedFloatMode() { write(saved_); }
  ScopedFloatMode(const ScopedFloatMode&) = delete;
  ScopedFloatMode& operator=(const ScopedFloatMode&) = delete;

 private:
#if defined(__x86_64__)
  using Mode = unsigned int;
  static constexpr Mode kCleared = 0x8000u | 0x0040u | 0x6000u;  // MXCSR: FTZ, DAZ, rounding control
  static Mode read() { return _mm_getcsr(); }
  static void write(Mode mode) { _mm_setcsr(mode); }
#elif defined(__aarch64__)
  using Mode = std::uint64_t;
  static constexpr Mode kCleared = (1ull << 24) | (3ull << 22);  // FPCR: FZ, RMode
  static Mode read() {
    Mode mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
  }
  static void write(Mode mode) { asm volatile("msr fpcr, %0" : : "r"(mode)); }
#else
#error "the floating-point mode of this processor is not known here: add how to read and clear it"
#endif
  Mode saved_;
};

}  // namespace shardam
