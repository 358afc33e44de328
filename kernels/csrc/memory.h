// Zeroed memory that is not resident before it is touched.
#pragma once

#include <cstddef>

namespace shardam {

class ZeroedMemory {
 public:
  ZeroedMemory() = default;
  // Zeroed, 64-byte aligned, on a large page's boundary from that size on. large_pages asks the system for 2 MiB pages where the size allows them: quicker at random
  // access, but a touch makes the whole page resident. Throws std::bad_alloc.
  ZeroedMemory(std::size_t size_bytes, bool large_pages);
  ~ZeroedMemory();
  ZeroedMemory(ZeroedMemory&& other) noexcept;
  ZeroedMemory& operator=(ZeroedMemory&& other) noexcept;

  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  // Asks the system for large pages from now on, for what is resident, too.
  void use_large_pages();
  std::size_t size_bytes() const { return size_bytes_; }

 private:
  void* data_ = nullptr;
  std::size_t size_bytes_ = 0;
  std::size_t mapped_bytes_ = 0;  // 0: from the allocator
};

}  // namespace shardam
