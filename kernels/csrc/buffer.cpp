#include "buffer.h"

#include <cstdlib>
#include <mutex>
#include <new>

namespace shardam {
namespace {

constexpr std::size_t kAlignment = 64;
constexpr std::size_t kKeptFrom = std::size_t{1} << 15;  // below, the allocator is as quick
constexpr int kKeptSizes = 8;    // 32 KiB to 4 MiB, each twice the one before: steps of up to a quarter of a million ids
constexpr int kKeptOfASize = 4;  // what a step takes of a size at a time

// Blocks of one size that nobody uses. The allocator would give their pages back to the system and take them again at each
// call: a quarter of a microsecond for each 4 KiB.
struct Kept {
  void* blocks[kKeptOfASize];
  int count = 0;
};

// Nobody waits for it: whoever finds it taken goes to the allocator, as a forked child must in which it stays taken for ever.
struct KeptMemory {
  std::mutex mutex;
  Kept sizes[kKeptSizes];
};

// Never freed: threads may give memory back while the process ends.
KeptMemory& kept_memory() {
  static auto* kept = new KeptMemory;
  return *kept;
}

// Which size holds so many bytes; kKeptSizes: none that is kept.
int size_of(std::size_t size_bytes) {
  int size = 0;
  while (size < kKeptSizes && (kKeptFrom << size) < size_bytes) ++size;
  return size;
}

}  // namespace

void* take_memory(std::size_t size_bytes) {
  const int size = size_bytes < kKeptFrom ? kKeptSizes : size_of(size_bytes);
  if (size < kKeptSizes) {
    KeptMemory& kept = kept_memory();
    const std::unique_lock<std::mutex> lock(kept.mutex, std::try_to_lock);
    if (lock.owns_lock() && kept.sizes[size].count > 0) return kept.sizes[size].blocks[--kept.sizes[size].count];
    size_bytes = kKeptFrom << size;
  }
  void* memory = std::aligned_alloc(kAlignment, (size_bytes + kAlignment - 1) / kAlignment * kAlignment);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

void give_memory(void* memory, std::size_t size_bytes) noexcept {
  const int size = size_bytes < kKeptFrom ? kKeptSizes : size_of(size_bytes);
  if (size < kKeptSizes) {
    KeptMemory& kept = kept_memory();
    const std::unique_lock<std::mutex> lock(kept.mutex, std::try_to_lock);
    if (lock.owns_lock() && kept.sizes[size].count < kKeptOfASize) {
      kept.sizes[size].blocks[kept.sizes[size].count++] = memory;
      return;
    }
  }
  std::free(memory);
}

}  // namespace shardam
