// A pool of threads for parallel loops, made for machines that are also busy with other work.
//
//   caller   publishes a loop ─▶ claims ranges of items ─▶ waits for the ranges that others have claimed
//   worker   spins for a moment, then sleeps ─▶ sees the loop ─▶ claims ranges ─▶ spins again
//
// OpenMP's barriers wait for every thread of a team, also for one that the operating system has not scheduled, and
// GNU's OpenMP spins meanwhile. Here the caller waits only for ranges that a thread has begun: a worker that is not
// running delays nothing, since the caller computes its share. A worker that is preempted in the middle of a range delays
// the caller until it is scheduled again. Spinning is bounded in time, and nearly off for a while after a thread that was
// spinning has noticed that it was preempted, because then the machine has other work. docs/LOG.md compares the latencies
// with OpenMP and with this pool.

#include "threads.h"

#include <atomic>
#include <climits>
#include <csignal>
#include <ctime>

#include <immintrin.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

constexpr int64_t kRangesPerThread = 4;
constexpr int64_t kQuietSpinNs = 500'000;        // covers what Python does between two layers
constexpr int64_t kBusySpinNs = 5'000;
constexpr int64_t kPreemptedNs = 200'000;        // a spinning thread was preempted if its clock advances by more at once
constexpr int64_t kBusyForNs = 100'000'000;      // the machine counts as busy for this time after a preemption
constexpr int kPausesPerClockReading = 8;

int64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1'000'000'000LL + time.tv_nsec;
}

static_assert(sizeof(std::atomic<uint32_t>) == 4 && std::atomic<uint32_t>::is_always_lock_free, "a futex is 4 bytes");

void futex_wait(std::atomic<uint32_t>& word, uint32_t expected) {
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t>& word, int num_threads) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, num_threads, nullptr, nullptr, 0);
}

// A loop's ranges in one word, so that claiming one is a single atomic addition: the number of threads that look for
// ranges, the number of ranges, and the next range. `next` exceeds `total` by at most one for each thread.
struct Ticket {
  uint64_t bits;

  static constexpr int kBits = 24;
  static constexpr uint64_t kMask = (1u << kBits) - 1;
  static uint64_t pack(uint64_t num_threads, uint64_t total) { return num_threads << 2 * kBits | total << kBits; }
  int64_t num_threads() const { return bits >> 2 * kBits; }
  int64_t total() const { return bits >> kBits & kMask; }
  int64_t next() const { return bits & kMask; }
  bool has_range() const { return next() < total(); }
};

class Pool {
 public:
  static Pool& get();

  void run(int64_t num_items, int64_t num_threads, Work work, void* context) {
    if (is_in_use_.test_and_set(std::memory_order_acquire)) {  // by another thread, or by a caller of this one
      Items items(num_items);
      return work(context, items);
    }
    add_workers(num_threads - 1);
    const int64_t num_ranges = std::min(num_items, num_threads * kRangesPerThread);
    work_ = work, context_ = context, num_items_ = num_items;
    num_unfinished_.store(static_cast<uint32_t>(num_ranges), std::memory_order_relaxed);
    ticket_.store(Ticket::pack(num_threads, num_ranges), std::memory_order_release);
    epoch_.fetch_add(1);
    if (num_sleeping_.load() > 0) futex_wake(epoch_, INT_MAX);  // a futex does not know which worker has which index
    compute();
    wait_until_done();
    is_in_use_.clear(std::memory_order_release);
  }

  // Claims a range. Returns its number, or -1 if none is left.
  int64_t claim() {
    if (!Ticket{ticket_.load(std::memory_order_relaxed)}.has_range()) return -1;
    const Ticket ticket{ticket_.fetch_add(1, std::memory_order_acq_rel)};
    return ticket.has_range() ? ticket.next() : -1;
  }

 private:
  // Computes ranges of the current loop, if any is left. A worker that comes late claims nothing, or a range of the loop
  // after the one that it saw.
  void compute() {
    const int64_t range = claim();
    if (range < 0) return;
    // The loop lasts until this range is counted below, so its fields are those that belong to the range.
    const int64_t num_ranges = Ticket{ticket_.load(std::memory_order_relaxed)}.total();
    Items items(range, num_ranges, num_items_);
    work_(context_, items);
    const uint32_t num_claimed = static_cast<uint32_t>(items.num_claimed());
    if (num_unfinished_.fetch_sub(num_claimed) == num_claimed && is_caller_asleep_.load()) futex_wake(num_unfinished_, 1);
  }

  void wait_until_done() {
    if (spin_until([&] { return num_unfinished_.load(std::memory_order_acquire) == 0; })) return;
    is_caller_asleep_.store(true);
    for (uint32_t count; (count = num_unfinished_.load()) != 0;) futex_wait(num_unfinished_, count);
    is_caller_asleep_.store(false);
  }

  void serve(int64_t index) {
    for (uint32_t seen = 0;;) {
      const auto has_changed = [&] { return epoch_.load(std::memory_order_acquire) != seen; };
      if (!spin_until(has_changed)) {
        num_sleeping_.fetch_add(1);
        while (epoch_.load() == seen) futex_wait(epoch_, seen);
        num_sleeping_.fetch_sub(1);
      }
      seen = epoch_.load(std::memory_order_acquire);
      if (Ticket{ticket_.load(std::memory_order_acquire)}.num_threads() > index) compute();
    }
  }

  // Spins until a condition holds. Returns false if it does not hold within `kQuietSpinNs`, or `kBusySpinNs` after a
  // preemption.
  template <class Condition>
  bool spin_until(Condition&& holds) {
    if (holds()) return true;
    int64_t last_ns = now_ns();
    const int64_t start_ns = last_ns;
    const int64_t limit_ns = start_ns < busy_until_ns_.load(std::memory_order_relaxed) ? kBusySpinNs : kQuietSpinNs;
    while (last_ns - start_ns < limit_ns) {
      for (int i = 0; i < kPausesPerClockReading; i++) {
        _mm_pause();
        if (holds()) return true;
      }
      const int64_t time_ns = now_ns();
      if (time_ns - last_ns > kPreemptedNs) busy_until_ns_.store(time_ns + kBusyForNs, std::memory_order_relaxed);
      last_ns = time_ns;
    }
    return false;
  }

  void add_workers(int64_t num_wanted) {
    for (; num_workers_ < num_wanted && can_start_; num_workers_++) {
      struct Start {
        Pool* pool;
        int64_t index;
      };
      // Signals to the process are handled by its other threads. Signals of a fault are handled by the thread that causes
      // it, and SIGPROF by the thread that is profiled.
      sigset_t blocked, previous;
      sigfillset(&blocked);
      for (int unblocked : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGPROF}) sigdelset(&blocked, unblocked);
      pthread_sigmask(SIG_SETMASK, &blocked, &previous);
      pthread_t thread;
      Start* start = new Start{this, num_workers_ + 1};
      const auto run = [](void* argument) -> void* {
        const Start start = *static_cast<Start*>(argument);
        delete static_cast<Start*>(argument);
        start.pool->serve(start.index);
        return nullptr;
      };
      const int error = pthread_create(&thread, nullptr, run, start);
      pthread_sigmask(SIG_SETMASK, &previous, nullptr);
      if (error != 0) {
        delete start;
        can_start_ = false;  // there are fewer threads, and they compute everything
        return;
      }
      pthread_setname_np(thread, "radixkv-compute");
      pthread_detach(thread);
    }
  }

  std::atomic_flag is_in_use_ = ATOMIC_FLAG_INIT;
  int64_t num_workers_ = 0;
  bool can_start_ = true;
  // The current loop:
  Work work_ = nullptr;
  void* context_ = nullptr;
  int64_t num_items_ = 0;
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<uint32_t> epoch_{0};  // loops so far
  std::atomic<int32_t> num_sleeping_{0};
  alignas(64) std::atomic<uint32_t> num_unfinished_{0};  // ranges of the current loop that are not computed yet
  std::atomic<bool> is_caller_asleep_{false};
  alignas(64) std::atomic<int64_t> busy_until_ns_{0};
};

// Never destroyed: workers wait in it until the process ends.
std::atomic<Pool*> the_pool{nullptr};

Pool& Pool::get() {
  Pool* pool = the_pool.load(std::memory_order_acquire);
  if (pool != nullptr) return *pool;
  Pool* created = new Pool;
  if (the_pool.compare_exchange_strong(pool, created)) {
    static std::atomic_flag is_registered = ATOMIC_FLAG_INIT;
    // A forked process has none of the threads, so it begins with a pool of its own.
    if (!is_registered.test_and_set()) pthread_atfork(nullptr, nullptr, [] { the_pool.store(nullptr); });
    return *created;
  }
  delete created;
  return *pool;
}

}  // namespace

Items::Items(int64_t first_range, int64_t num_ranges, int64_t num_items)
    : num_ranges_(num_ranges), num_items_(num_items) {
  set_range(first_range);
}

bool Items::claim() {
  if (num_ranges_ == 0) return false;
  const int64_t range = Pool::get().claim();
  if (range < 0) return false;
  num_claimed_++;
  set_range(range);
  return true;
}

void Items::set_range(int64_t range) {
  next_ = num_items_ * range / num_ranges_;
  end_ = num_items_ * (range + 1) / num_ranges_;
}

void run_parallel(int64_t num_items, int64_t num_threads, Work work, void* context) {
  Pool::get().run(num_items, num_threads, work, context);
}
