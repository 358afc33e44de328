#include "memory.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

namespace shardam {
namespace {

constexpr std::size_t kAlignment = 64;
constexpr std::size_t kMapFrom = std::size_t{1} << 16;  // below, whole pages and a mapping each would be waste
constexpr std::size_t kLargePage = std::size_t{1} << 21;
constexpr std::size_t kMaxSize = std::size_t{1} << 62;

std::size_t round_up(std::size_t value, std::size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

#if defined(MAP_NORESERVE)
constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
#else
constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS;
#endif

void* map(std::size_t size_bytes) {
  void* mapped = mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, kFlags, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  return mapped;
}

// Maps with the start on a large page's boundary, by mapping more and giving back both ends.
void* map_aligned(std::size_t size_bytes) {
  char* mapped = static_cast<char*>(map(size_bytes + kLargePage));
  const auto address = reinterpret_cast<std::uintptr_t>(mapped);
  const std::size_t head = round_up(address, kLargePage) - address;
  if (head > 0) munmap(mapped, head);
  munmap(mapped + head + size_bytes, kLargePage - head);
  return mapped + head;
}

// Advice: a system without large pages refuses it, and works.
void advise_large_pages(void* data, std::size_t size_bytes) {
#if defined(MADV_HUGEPAGE)
  madvise(data, size_bytes, MADV_HUGEPAGE);
#else
  static_cast<void>(data);
  static_cast<void>(size_bytes);
#endif
}

}  // namespace

ZeroedMemory::ZeroedMemory(std::size_t size_bytes, bool large_pages) {
  if (size_bytes == 0) return;
  if (size_bytes > kMaxSize) throw std::bad_alloc();
  if (size_bytes < kMapFrom) {
    size_bytes_ = round_up(size_bytes, kAlignment);
    data_ = std::aligned_alloc(kAlignment, size_bytes_);
    if (data_ == nullptr) throw std::bad_alloc();
    std::memset(data_, 0, size_bytes_);
    return;
  }
  const bool large = large_pages && size_bytes >= kLargePage;
  size_bytes_ = round_up(size_bytes, large ? kLargePage : kMapFrom);
  data_ = size_bytes_ >= kLargePage ? map_aligned(size_bytes_) : map(size_bytes_);
  mapped_bytes_ = size_bytes_;
  if (large) advise_large_pages(data_, size_bytes_);
}

void ZeroedMemory::use_large_pages() {
  if (mapped_bytes_ < kLargePage) return;
  advise_large_pages(data_, mapped_bytes_);
#if defined(__linux__)
  constexpr int kCollapse = 25;  // MADV_COLLAPSE of Linux 6.1, which headers of older systems lack
  madvise(data_, mapped_bytes_, kCollapse);
#endif
}

ZeroedMemory::~ZeroedMemory() {
  if (mapped_bytes_ > 0) {
    munmap(data_, mapped_bytes_);
  } else {
    std::free(data_);
  }
}

ZeroedMemory::ZeroedMemory(ZeroedMemory&& other) noexcept { *this = std::move(other); }

ZeroedMemory& ZeroedMemory::operator=(ZeroedMemory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_bytes_, other.size_bytes_);
  std::swap(mapped_bytes_, other.mapped_bytes_);
  return *this;
}

}  // namespace shardam
