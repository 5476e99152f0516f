// A pool of threads that share the tiles of a level. The calling thread publishes a job and takes part. A helper takes tiles while
// there are some; nobody waits for a helper that has not come. Helpers spin while a call runs, and sleep between calls.
#pragma once
#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

class Threads {
 public:
  // The pool of this process. It is never destroyed: its threads run until the process ends.
  static Threads& get() {
    Threads* pool = pool_.load();
    if (pool) return *pool;
    Threads* made = new Threads();
    if (pool_.compare_exchange_strong(pool, made)) return *made;
    delete made;
    return *pool;
  }

  // Sets how many threads a pool has from now on.
  static void set_count(int n) { most_.store(n < 1 ? 1 : n > 64 ? 64 : n); }

  int count() const { return count_; }

  // Wakes the helpers: they spin until `end`. One call uses the pool at a time, and others wait: they would share its cores.
  void begin() {
    owner_.lock();
    start();
    { std::lock_guard<std::mutex> lock(mutex_); active_.store(true); }
    awake_.notify_all();
  }

  void end() {
    active_.store(false);
    owner_.unlock();
  }

  // Runs task(thread, 0), ..., task(thread, n - 1), and returns when all have ended. Throws what the first that failed has thrown.
  void run(uint64_t n, const std::function<void(int, int64_t)>& task) {
    task_ = &task;
    done_.store(0, std::memory_order_relaxed);
    failed_.store(false, std::memory_order_relaxed);
    uint64_t epoch = (ticket_.load(std::memory_order_relaxed) >> 48) + 1;
    ticket_.store(epoch << 48 | n << 24, std::memory_order_release);
    while (take(0)) {}
    for (int spins = 0; done_.load(std::memory_order_acquire) != n; spins++) rest(spins);
    if (failed_.load()) std::rethrow_exception(std::move(error_));
  }

 private:
  Threads() : count_(most_.load()) {}

  // Starts the helpers that there are not yet. They need not all start: the others, and the calling thread, do the work.
  void start() {
    try {
      for (; started_ < count_; started_++) std::thread([this, i = started_] { help(i); }).detach();
    } catch (const std::exception&) {
    }
  }

  // Takes a tile of the present job and runs it. False if none is left.
  bool take(int thread) {
    uint64_t now = ticket_.load(std::memory_order_acquire);
    do {
      if ((now & 0xffffff) >= (now >> 24 & 0xffffff)) return false;
    } while (!ticket_.compare_exchange_weak(now, now + 1, std::memory_order_acq_rel, std::memory_order_acquire));
    try {
      (*task_)(thread, now & 0xffffff);  // the job cannot end before this tile has
    } catch (...) {
      if (!failed_.exchange(true)) error_ = std::current_exception();
    }
    done_.fetch_add(1, std::memory_order_release);
    return true;
  }

  static void rest(int spins) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
    if (spins > 4000) std::this_thread::yield();
  }

  void help(int thread) {
    for (;;) {
      {
        std::unique_lock<std::mutex> lock(mutex_);
        awake_.wait(lock, [this] { return active_.load(); });
      }
      for (int spins = 0; active_.load(std::memory_order_acquire); spins++) {
        if (take(thread)) spins = 0;
        else rest(spins);
      }
    }
  }

  // A child that is forked has none of the threads, and perhaps a lock that one of them had: it makes another pool.
  static void forget() { pool_.store(nullptr); }

  static inline std::atomic<Threads*> pool_{nullptr};
  static inline std::atomic<int> most_{1};
  static inline const int forgotten_ = pthread_atfork(nullptr, nullptr, forget);

  const int count_;
  int started_ = 1;  // the calling thread is the first
  std::mutex mutex_, owner_;
  std::condition_variable awake_;
  std::atomic<bool> active_{false};
  std::atomic<uint64_t> ticket_{0};  // 16 bits of the job's number, 24 of its tiles, 24 of the next tile
  std::atomic<uint64_t> done_{0};
  std::atomic<bool> failed_{false};
  std::exception_ptr error_;
  const std::function<void(int, int64_t)>* task_ = nullptr;
};

// The threads that run a call: the calling one, and the pool's from the first work that is for several.
class Team {
 public:
  Team() : pool_(Threads::get()) {}
  ~Team() {
    if (mine_) pool_.end();
  }
  int count() const { return pool_.count(); }
  void run(int64_t n, bool alone, const std::function<void(int, int64_t)>& task) {
    if (alone || n == 1 || count() == 1) {
      for (int64_t i = 0; i < n; i++) task(0, i);
      return;
    }
    if (!mine_) pool_.begin();
    mine_ = true;
    pool_.run(n, task);
  }

 private:
  Threads& pool_;
  bool mine_ = false;
};
