// An uninitialized array, aligned to 64 bytes and freed by its destructor.
#pragma once

#include <cstdint>
#include <cstdlib>

template <class Number>
class Buffer {
 public:
  explicit Buffer(int64_t count)
      : numbers_(static_cast<Number*>(std::aligned_alloc(64, (count * sizeof(Number) + 63) / 64 * 64))) {
    if (numbers_ == nullptr && count > 0) std::abort();
  }
  ~Buffer() { std::free(numbers_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  operator Number*() const { return numbers_; }

 private:
  Number* numbers_;
};
