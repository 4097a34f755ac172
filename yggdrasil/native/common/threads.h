// Thread pool for parallel regions of a few microseconds, and stages of work within a region.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace yggdrasil {

// A step has dozens of parallel regions. Threads claim chunks one by one, so a worker that the operating system has
// descheduled does not delay a region: the caller can process all chunks itself. An OpenMP region waits for every
// thread, which on a busy machine costs a time slice of the scheduler, 1000x the work.
class ThreadPool {
 public:
  static ThreadPool& instance() {
    static ThreadPool* pool = new ThreadPool;  // never destroyed: workers may outlive static destructors
    return *pool;
  }

  void run(int64_t chunks, int64_t num_threads, void (*body)(void*, int64_t), void* context) {
    const std::lock_guard<std::mutex> region_lock(region_);
    while (static_cast<int64_t>(workers_) < num_threads - 1) std::thread(&ThreadPool::work, this, workers_++).detach();
    body_ = body;
    context_ = context;
    num_wanted_.store(num_threads - 1, std::memory_order_relaxed);
    finished_.store(0, std::memory_order_relaxed);
    const uint64_t epoch = ((ticket_.load(std::memory_order_relaxed) >> kEpochShift) + 1) & kEpochs;
    ticket_.store(epoch << kEpochShift | static_cast<uint64_t>(chunks) << kCountShift, std::memory_order_release);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) ticket_.notify_all();
    claim_all(epoch);
    for (Backoff backoff; finished_.load(std::memory_order_acquire) < chunks;) backoff.wait();
  }

  // Busy waiting: spins for some microseconds, then yields the core to other threads. On a busy machine, the thread
  // that is waited for may be one of them.
  class Backoff {
   public:
    void wait() {
      if (++spins_ < kSpins) {
        pause();
      } else {
        std::this_thread::yield();
      }
    }

   private:
    static constexpr int kSpins = 1024;  // some 10 to 40 microseconds
    int spins_ = 0;
  };

 private:
  static constexpr int kCountShift = 20, kEpochShift = 40;  // bit fields of a ticket: next chunk, number of chunks, epoch
  static constexpr uint64_t kField = (1u << 20) - 1, kEpochs = (uint64_t{1} << (64 - kEpochShift)) - 1;
  // A worker spins for longer than a drafting phase takes: waking a halted virtual processor costs as much as a small
  // step.
  static constexpr std::chrono::milliseconds kSpinTime{5};

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  void claim_all(uint64_t epoch) {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    while (ticket >> kEpochShift == epoch && (ticket & kField) < (ticket >> kCountShift & kField)) {
      if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) continue;
      // The region cannot end before this chunk, so body and context are those of this epoch.
      body_(context_, static_cast<int64_t>(ticket & kField));
      finished_.fetch_add(1, std::memory_order_release);
      ticket = ticket_.load(std::memory_order_acquire);
    }
  }

  void work(int64_t id) {
    uint64_t last_epoch = 0;
    for (;;) {
      uint64_t ticket = ticket_.load(std::memory_order_acquire);
      const auto deadline = std::chrono::steady_clock::now() + kSpinTime;
      for (Backoff backoff; ticket >> kEpochShift == last_epoch && std::chrono::steady_clock::now() < deadline;) {
        for (int spin = 0; spin < 64 && ticket >> kEpochShift == last_epoch; ++spin) {
          backoff.wait();
          ticket = ticket_.load(std::memory_order_acquire);
        }
      }
      if (ticket >> kEpochShift == last_epoch) {
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        ticket_.wait(ticket, std::memory_order_acquire);
        sleepers_.fetch_sub(1, std::memory_order_seq_cst);
        continue;
      }
      last_epoch = ticket >> kEpochShift;
      if (id < num_wanted_.load(std::memory_order_relaxed)) claim_all(last_epoch);
    }
  }

  std::mutex region_;
  int64_t workers_ = 0;
  void (*body_)(void*, int64_t) = nullptr;
  void* context_ = nullptr;
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<int64_t> finished_{0};
  alignas(64) std::atomic<int64_t> num_wanted_{0};
  std::atomic<int> sleepers_{0};
};

constexpr int64_t kManyItems = 256;  // default number of items from which on a thread gets several chunks

// Returns the number of chunks for `count` items: one per thread, or four from `many_items` on. More chunks balance the
// load better, but each costs a claim and starts reading weights that were not prefetched.
inline int64_t num_chunks_of(int64_t count, int64_t num_threads, int64_t many_items) {
  return std::min(count, count < many_items ? num_threads : 4 * num_threads);
}

// Calls body(begin, end) for chunks of [0, count) on all threads.
template <typename Function>
void parallel(int64_t count, int64_t num_threads, const Function& body, int64_t many_items = kManyItems) {
  const int64_t chunks = num_chunks_of(count, num_threads, many_items);
  if (num_threads <= 1 || chunks <= 1) {
    body(0, count);
    return;
  }
  struct Region {
    const Function& body;
    int64_t count, chunks;
  } region{body, count, chunks};
  ThreadPool::instance().run(
      chunks, num_threads,
      [](void* context, int64_t chunk) {
        const Region& r = *static_cast<Region*>(context);
        r.body(r.count * chunk / r.chunks, r.count * (chunk + 1) / r.chunks);
      },
      &region);
}

// Stages of work in one parallel region. No chunk of a stage starts before all chunks of earlier stages have finished.
// Chunks are claimed in order, so every unfinished chunk of an earlier stage is being run by some thread.
class Stages {
 public:
  // Adds a stage that calls (work.*Body)(begin, end) for chunks of [0, count); `work` must exist when the stages run.
  template <auto Body, typename Work>
  void add(const Work& work, int64_t count, int64_t chunks) {
    all_.push_back({count, std::min(count, chunks), &work, [](const void* of, int64_t begin, int64_t end) {
                      (static_cast<const Work*>(of)->*Body)(begin, end);
                    }});
  }

  bool is_empty() const { return all_.empty(); }
  void clear() { all_.clear(); }

  void run(int64_t num_threads) {
    size_t first = 0;  // leading stages of one chunk run on the caller before workers are woken
    while (first < all_.size() && (num_threads <= 1 || all_[first].chunks <= 1)) all_[first++].run(0, 1);
    int64_t chunks = 0;
    for (size_t i = first; i < all_.size(); ++i) all_[i].before = chunks, chunks += all_[i].chunks;
    if (chunks == 0) return;
    first_ = first;
    done_.store(0, std::memory_order_relaxed);
    ThreadPool::instance().run(chunks, num_threads, [](void* stages, int64_t chunk) { static_cast<Stages*>(stages)->run_chunk(chunk); }, this);
  }

 private:
  struct Stage {
    int64_t count, chunks;
    const void* work;
    void (*call)(const void*, int64_t, int64_t);
    int64_t before = 0;  // chunks of the stages before it

    void run(int64_t chunk, int64_t of) const { call(work, count * chunk / of, count * (chunk + 1) / of); }
  };

  void run_chunk(int64_t chunk) {
    size_t i = first_;
    while (i + 1 < all_.size() && chunk >= all_[i + 1].before) ++i;
    const Stage& stage = all_[i];
    for (ThreadPool::Backoff backoff; done_.load(std::memory_order_acquire) < stage.before;) backoff.wait();
    stage.run(chunk - stage.before, stage.chunks);
    done_.fetch_add(1, std::memory_order_release);
  }

  std::vector<Stage> all_;
  size_t first_ = 0;
  alignas(64) std::atomic<int64_t> done_{0};  // finished chunks; all other members are read-only while threads run
};

}  // namespace yggdrasil
