// Zeroed memory that is not resident before it is touched.
#pragma once

#include <cstddef>

namespace shardam {

class ZeroedMemory {
 public:
  ZeroedMemory() = default;
  // Zeroed, 64-byte aligned; from the size of a large page on, on such a page's boundary. large_pages asks the system for pages
  // of 2 MiB where the size allows them: quicker at random access, but a touch makes the whole page resident. Throws
  // std::bad_alloc.
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
