// Threads that share the items of a parallel region. See `threads.cpp` for how they wait.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

// The items of a region that one thread computes: ranges that it claims, one after another, until none is left.
class Items {
 public:
  // A range of the calling thread alone, for a region that is not shared.
  explicit Items(int64_t num_items) : next_(0), end_(num_items) {}
  // Ranges of a shared region, the first of which is claimed already.
  Items(int64_t first_range, int64_t num_ranges, int64_t num_items);

  // Sets `item` to the next item. Returns false if there is none.
  bool next(int64_t& item) {
    if (next_ == end_ && !claim()) return false;
    item = next_++;
    return true;
  }

  int64_t num_claimed() const { return num_claimed_; }

 private:
  bool claim();
  void take(int64_t range);

  int64_t next_, end_;
  int64_t num_ranges_ = 0, num_items_ = 0;  // of a shared region
  int64_t num_claimed_ = 1;                 // ranges
};

using Work = void (*)(void* context, Items& items);

// Calls `work` on the calling thread and on up to `num_threads - 1` others until all items are computed.
void share_items(int64_t num_items, int64_t num_threads, Work work, void* context);

// Computes `num_items` independent items on up to `num_threads` threads. Each thread that claims items calls
// `work(Items&)` once, which may set up what the thread needs for all of them. Returns when all are computed.
//
//   share(num_rows, num_threads, [&](Items& items) {
//     for (int64_t row; items.next(row);) ...
//   });
template <class Function>
void share(int64_t num_items, int64_t num_threads, Function&& work) {
  if (num_threads <= 1 || num_items <= 1) {
    Items items(num_items);
    if (num_items > 0) work(items);
    return;
  }
  using Callable = std::remove_reference_t<Function>;
  share_items(
      num_items, num_threads, [](void* context, Items& items) { (*static_cast<Callable*>(context))(items); },
      const_cast<std::remove_const_t<Callable>*>(&work));
}

// Calls `compute(item)` for each of `num_items` independent items.
template <class Function>
void share_each(int64_t num_items, int64_t num_threads, Function&& compute) {
  share(num_items, num_threads, [&](Items& items) {
    for (int64_t item; items.next(item);) compute(item);
  });
}
