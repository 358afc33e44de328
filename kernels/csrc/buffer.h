// Arrays that live as long as a call or a step, in memory that is kept for the next one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace shardam {

// At least so many bytes, 64-byte aligned and uninitialised, kept from before if there are. Throws std::bad_alloc.
void* take_memory(std::size_t size_bytes);
// size_bytes as it was taken.
void give_memory(void* memory, std::size_t size_bytes) noexcept;

// An array of numbers that starts uninitialised.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  // Throws std::bad_alloc.
  explicit Buffer(std::int64_t size) : room_(size), size_(size) {
    if (size > 0) data_ = static_cast<T*>(take_memory(room_bytes()));
  }
  ~Buffer() {
    if (data_ != nullptr) give_memory(data_, room_bytes());
  }
  Buffer(Buffer&& other) noexcept { *this = std::move(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(room_, other.room_);
    std::swap(size_, other.size_);
    return *this;
  }

  T* data() const { return data_; }
  std::int64_t size() const { return size_; }
  T& operator[](std::int64_t at) const { return data_[at]; }
  void shorten(std::int64_t size) { size_ = size; }

 private:
  std::size_t room_bytes() const { return static_cast<std::size_t>(room_) * sizeof(T); }

  T* data_ = nullptr;
  std::int64_t room_ = 0;
  std::int64_t size_ = 0;
};

}  // namespace shardam
