// Parallel loops on the threads of a pool. See `threads.cpp` for how they wait.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

// The items of a loop that one thread computes: ranges that it claims, one after another, until none is left.
class Items {
 public:
  // All items, for a loop that runs on the calling thread alone.
  explicit Items(int64_t num_items) : next_(0), end_(num_items) {}
  // Ranges of a parallel loop, of which the caller has already claimed `first_range`.
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
  void set_range(int64_t range);

  int64_t next_, end_;
  int64_t num_ranges_ = 0, num_items_ = 0;  // only for a parallel loop
  int64_t num_claimed_ = 1;                 // number of claimed ranges
};

using Work = void (*)(void* context, Items& items);

// `parallel_items` without templates.
void run_parallel(int64_t num_items, int64_t num_threads, Work work, void* context);

// Computes `num_items` independent items on about `num_threads` threads, the calling one among them, and returns when all
// are computed. Each thread that claims items calls `work(Items&)` once, which may set up what it needs for all of them:
//
//   parallel_items(num_rows, num_threads, [&](Items& items) {
//     Scratch scratch;
//     for (int64_t row; items.next(row);) ...
//   });
//
// `work` calls `next` until it returns false, and throws nothing. There is one pool per process: a call from within
// `work`, or while another thread's call is running, computes all its items on the calling thread. While requests are
// served, only the engine's thread uses the pool, except while another thread loads an adapter.
template <class Function>
void parallel_items(int64_t num_items, int64_t num_threads, Function&& work) {
  if (num_threads <= 1 || num_items <= 1) {
    Items items(num_items);
    if (num_items > 0) work(items);
    return;
  }
  using Callable = std::remove_reference_t<Function>;
  run_parallel(
      num_items, num_threads, [](void* context, Items& items) { (*static_cast<Callable*>(context))(items); },
      const_cast<std::remove_const_t<Callable>*>(&work));
}

// Calls `compute(item)` for each of `num_items` independent items, as `parallel_items` does.
template <class Function>
void parallel_for(int64_t num_items, int64_t num_threads, Function&& compute) {
  parallel_items(num_items, num_threads, [&](Items& items) {
    for (int64_t item; items.next(item);) compute(item);
  });
}
