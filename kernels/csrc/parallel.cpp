#include "parallel.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <new>
#include <thread>

namespace shardam {
namespace {

// How long a kept thread looks for the next call before it sleeps: the calls of one request follow each other within it.
constexpr std::chrono::microseconds kIdleSpin{30};
constexpr int kLooks = 32;  // between two looks at the clock

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Calls is_done until it is true, for about as long as given; returns whether it was.
template <class IsDone>
bool spin_for(std::chrono::microseconds limit, const IsDone& is_done) {
  const auto end = std::chrono::steady_clock::now() + limit;
  do {
    for (int look = 0; look < kLooks; ++look) {
      if (is_done()) return true;
      relax();
    }
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

// One job's parts, and who is next: a number of the job, how many parts it has, and the next part, in one word, so that a
// thread that comes late for one job can neither miss nor repeat a part of another.
struct Ticket {
  static constexpr int kBits = 20;
  static constexpr std::uint64_t kMask = (1u << kBits) - 1;

  static std::uint64_t next(std::uint64_t ticket) { return ticket & kMask; }
  static std::uint64_t num_parts(std::uint64_t ticket) { return ticket >> kBits & kMask; }
  static bool has_part(std::uint64_t ticket) { return next(ticket) < num_parts(ticket); }
  static std::uint64_t after(std::uint64_t ticket, int num_parts) {
    const std::uint64_t job = (ticket >> 2 * kBits) + 1;
    return job << 2 * kBits | static_cast<std::uint64_t>(num_parts) << kBits;
  }
};

class ThreadPool {
 public:
  // Returns false, having run nothing, while another call has the threads.
  bool run(int num_threads, int num_parts, void (*part)(const void*, int), const void* context) {
    const std::unique_lock<std::mutex> owner(owner_, std::try_to_lock);
    if (!owner.owns_lock()) return false;
    start(num_threads - 1);
    part_ = part;
    context_ = context;
    unfinished_.store(num_parts, std::memory_order_relaxed);
    ticket_.store(Ticket::after(ticket_.load(), num_parts));
    wake(num_threads - 1);
    while (take_part()) {
    }
    const auto is_done = [&] { return unfinished_.load(std::memory_order_acquire) == 0; };
    while (!spin_for(kIdleSpin, is_done)) sched_yield();  // a thread was interrupted in its last part
    return true;
  }

 private:
  // Runs one part, if there is one.
  bool take_part() {
    if (!Ticket::has_part(ticket_.load(std::memory_order_acquire))) return false;
    const std::uint64_t taken = ticket_.fetch_add(1, std::memory_order_acq_rel);
    if (!Ticket::has_part(taken)) return false;
    {
      ScopedFloatMode mode;
      part_(context_, static_cast<int>(Ticket::next(taken)));
    }
    unfinished_.fetch_sub(1, std::memory_order_acq_rel);
    return true;
  }

  void start(int num_threads) {
    if (num_started_ >= num_threads) return;
    sigset_t all, before;  // signals are for the threads that the process made itself
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      for (; num_started_ < num_threads; ++num_started_) std::thread([this] { serve(); }).detach();
    } catch (const std::exception&) {
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  void wake(int num_threads) {
    if (num_asleep_.load() == 0) return;
    const std::lock_guard<std::mutex> lock(sleep_);
    for (int index = 0; index < num_threads; ++index) woken_.notify_one();
  }

  [[noreturn]] void serve() {
    const auto has_part = [&] { return Ticket::has_part(ticket_.load()); };
    while (true) {
      if (take_part() || spin_for(kIdleSpin, has_part)) continue;
      std::unique_lock<std::mutex> lock(sleep_);
      ++num_asleep_;
      woken_.wait(lock, has_part);
      --num_asleep_;
    }
  }

  std::mutex owner_;  // held by the call whose parts are run
  int num_started_ = 0;
  void (*part_)(const void*, int) = nullptr;  // read by those who have taken a part, and it is not finished before that
  const void* context_ = nullptr;
  std::atomic<std::uint64_t> ticket_{0};
  std::atomic<int> unfinished_{0};
  std::mutex sleep_;
  std::condition_variable woken_;
  std::atomic<int> num_asleep_{0};
};

std::atomic<ThreadPool*> pool{nullptr};

// Never freed: its threads live as long as the process. A forked child has none of them, so it makes a pool of its own.
ThreadPool* the_pool() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { pool.store(nullptr); });
  static_cast<void>(registered);
  ThreadPool* present = pool.load();
  if (present != nullptr) return present;
  auto* made = new (std::nothrow) ThreadPool;
  if (made == nullptr || pool.compare_exchange_strong(present, made)) return made;
  delete made;
  return present;
}

}  // namespace

void run_on_threads(int num_threads, int num_parts, void (*run)(const void*, int), const void* context) {
  const int wanted = std::min({num_threads, num_parts, kMaxThreads});
  ThreadPool* threads = the_pool();
  if (threads != nullptr && threads->run(wanted, num_parts, run, context)) return;
  ScopedFloatMode mode;
  for (int index = 0; index < num_parts; ++index) run(context, index);
}

}  // namespace shardam
