// A pool of threads that share the tiles of a level. The calling thread publishes a job and takes part. A helper takes tiles while
// there are some; nobody waits for a helper that has not come. Helpers spin while a call runs, and sleep between calls.
#pragma once
#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>
#if defined(__linux__)
#include <sched.h>
#include <unistd.h>
#endif

class Threads {
 public:
  static Threads& get() {
    static Threads* pool = new Threads();  // never destroyed: its threads run until the process ends
    return *pool;
  }

  int count() const { return (int)helpers_.size() + 1; }

  // Whether there are helpers: they do not survive a fork.
  bool usable() const { return getpid() == process_; }

  // Wakes the helpers: they spin until `end`. One call uses the pool at a time, and others wait: they would share its cores.
  void begin() {
    owner_.lock();
    { std::lock_guard<std::mutex> lock(mutex_); active_.store(true); }
    awake_.notify_all();
  }

  void end() {
    active_.store(false);
    owner_.unlock();
  }

  // Runs task(thread, 0), ..., task(thread, n - 1), and returns when all have ended.
  void run(uint64_t n, const std::function<void(int, int64_t)>& task) {
    task_ = &task;
    done_.store(0, std::memory_order_relaxed);
    uint64_t epoch = (ticket_.load(std::memory_order_relaxed) >> 48) + 1;
    ticket_.store(epoch << 48 | n << 24, std::memory_order_release);
    while (take(0)) {}
    for (int spins = 0; done_.load(std::memory_order_acquire) != n; spins++) rest(spins);
  }

 private:
  Threads() {
    int n = 0;
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) n = CPU_COUNT(&set);
#endif
    if (n == 0) n = (int)std::thread::hardware_concurrency();
    process_ = getpid();
    n = n < 1 ? 1 : n > 64 ? 64 : n;
    for (int i = 1; i < n; i++) helpers_.emplace_back([this, i] { help(i); });
    for (auto& t : helpers_) t.detach();
  }

  // Takes a tile of the present job and runs it. False if none is left.
  bool take(int thread) {
    uint64_t now = ticket_.load(std::memory_order_acquire);
    do {
      if ((now & 0xffffff) >= (now >> 24 & 0xffffff)) return false;
    } while (!ticket_.compare_exchange_weak(now, now + 1, std::memory_order_acq_rel, std::memory_order_acquire));
    (*task_)(thread, now & 0xffffff);  // the job cannot end before this tile has
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

  std::vector<std::thread> helpers_;
  std::mutex mutex_, owner_;
  std::condition_variable awake_;
  std::atomic<bool> active_{false};
  std::atomic<uint64_t> ticket_{0};  // 16 bits of the job's number, 24 of its tiles, 24 of the next tile
  std::atomic<uint64_t> done_{0};
  const std::function<void(int, int64_t)>* task_ = nullptr;
  pid_t process_;
};

// The threads that run a call: the calling one, and the pool's from the first work that is for several.
class Team {
 public:
  Team() : pool_(Threads::get()), count_(pool_.usable() ? pool_.count() : 1) {}
  ~Team() {
    if (mine_) pool_.end();
  }
  int count() const { return count_; }
  void run(int64_t n, bool alone, const std::function<void(int, int64_t)>& task) {
    if (alone || n == 1 || count_ == 1) {
      for (int64_t i = 0; i < n; i++) task(0, i);
      return;
    }
    if (!mine_) pool_.begin();
    mine_ = true;
    pool_.run(n, task);
  }

 private:
  Threads& pool_;
  int count_;
  bool mine_ = false;
};
