// Parallel regions of a few microseconds.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <thread>

namespace yggdrasil {

// A step has dozens of parallel regions of a few microseconds. Chunks are claimed one by one, so a worker that the
// operating system is not running just now delays nobody: the caller takes all chunks itself. (An OpenMP region waits
// for every thread to arrive, which on a busy machine costs a scheduler's time slice, a thousand times the work.)
class Team {
 public:
  static Team& instance() {
    static Team* team = new Team;  // never destroyed: workers may outlive static destructors
    return *team;
  }

  void run(int64_t chunks, int64_t num_threads, void (*body)(void*, int64_t), void* context) {
    const std::lock_guard<std::mutex> one_region(region_);
    while (static_cast<int64_t>(workers_) < num_threads - 1) std::thread(&Team::work, this, workers_++).detach();
    body_ = body;
    context_ = context;
    wanted_.store(num_threads - 1, std::memory_order_relaxed);
    finished_.store(0, std::memory_order_relaxed);
    const uint64_t epoch = (ticket_.load(std::memory_order_relaxed) >> kEpochShift) + 1;
    ticket_.store(epoch << kEpochShift | static_cast<uint64_t>(chunks) << kCountShift, std::memory_order_release);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) ticket_.notify_all();
    claim_all(epoch);
    for (Patience patience; finished_.load(std::memory_order_acquire) < chunks;) patience.wait();
  }

  // Waits awake: first for what is a few microseconds away, then giving way to whoever else wants this core. On a busy
  // machine that may be the very thread that is waited for.
  class Patience {
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
  static constexpr int kCountShift = 20, kEpochShift = 40;  // next chunk, number of chunks, epoch
  static constexpr uint64_t kField = (1u << 20) - 1;
  // A worker waits awake through a whole drafting phase: waking a halted virtual processor costs as much as a small step.
  static constexpr std::chrono::milliseconds kAwake{5};

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  void claim_all(uint64_t epoch) {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    while (ticket >> kEpochShift == epoch && (ticket & kField) < (ticket >> kCountShift & kField)) {
      if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) continue;
      // The region cannot end before this chunk does, so body and context are the ones of this epoch.
      body_(context_, static_cast<int64_t>(ticket & kField));
      finished_.fetch_add(1, std::memory_order_release);
      ticket = ticket_.load(std::memory_order_acquire);
    }
  }

  void work(int64_t id) {
    uint64_t seen = 0;
    for (;;) {
      uint64_t ticket = ticket_.load(std::memory_order_acquire);
      const auto deadline = std::chrono::steady_clock::now() + kAwake;
      for (Patience patience; ticket >> kEpochShift == seen && std::chrono::steady_clock::now() < deadline;) {
        for (int spin = 0; spin < 64 && ticket >> kEpochShift == seen; ++spin) {
          patience.wait();
          ticket = ticket_.load(std::memory_order_acquire);
        }
      }
      if (ticket >> kEpochShift == seen) {
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        ticket_.wait(ticket, std::memory_order_acquire);
        sleepers_.fetch_sub(1, std::memory_order_seq_cst);
        continue;
      }
      seen = ticket >> kEpochShift;
      if (id < wanted_.load(std::memory_order_relaxed)) claim_all(seen);
    }
  }

  std::mutex region_;
  int64_t workers_ = 0;
  void (*body_)(void*, int64_t) = nullptr;
  void* context_ = nullptr;
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<int64_t> finished_{0};
  alignas(64) std::atomic<int64_t> wanted_{0};
  std::atomic<int> sleepers_{0};
};

constexpr int64_t kMuch = 256;  // items, where nothing else is said of them

// Chunks for so many items: one a thread, or four where there is much to share. Chunks balance threads, but each costs a
// claim, and begins a stream of weights that nothing has prefetched.
inline int64_t num_chunks_of(int64_t count, int64_t num_threads, int64_t much) {
  return std::min(count, count < much ? num_threads : 4 * num_threads);
}

// Calls body(begin, end) over [0, count), shared out in chunks.
template <typename Function>
void parallel(int64_t count, int64_t num_threads, const Function& body, int64_t much = kMuch) {
  const int64_t chunks = num_chunks_of(count, num_threads, much);
  if (num_threads <= 1 || chunks <= 1) {
    body(0, count);
    return;
  }
  struct Region {
    const Function& body;
    int64_t count, chunks;
  } region{body, count, chunks};
  Team::instance().run(
      chunks, num_threads,
      [](void* context, int64_t chunk) {
        const Region& r = *static_cast<Region*>(context);
        r.body(r.count * chunk / r.chunks, r.count * (chunk + 1) / r.chunks);
      },
      &region);
}

// The same behind first(begin, end) over [0, first_count), a chunk a thread: one region, in which no chunk of the body
// begins before all of the first are done. They are claimed before it, so each is in the hands of some thread.
template <typename First, typename Function>
void parallel_behind(int64_t first_count, const First& first, int64_t count, int64_t num_threads, const Function& body,
                     int64_t much = kMuch) {
  const int64_t first_chunks = std::min(first_count, num_threads), chunks = num_chunks_of(count, num_threads, much);
  if (num_threads <= 1) {
    first(0, first_count);
    body(0, count);
    return;
  }
  struct Region {
    const First& first;
    const Function& body;
    int64_t first_count, first_chunks, count, chunks;
    std::atomic<int64_t> done{0};
  } region{first, body, first_count, first_chunks, count, chunks};
  Team::instance().run(
      first_chunks + chunks, num_threads,
      [](void* context, int64_t chunk) {
        Region& r = *static_cast<Region*>(context);
        if (chunk < r.first_chunks) {
          r.first(r.first_count * chunk / r.first_chunks, r.first_count * (chunk + 1) / r.first_chunks);
          r.done.fetch_add(1, std::memory_order_release);
          return;
        }
        for (Team::Patience patience; r.done.load(std::memory_order_acquire) < r.first_chunks;) patience.wait();
        chunk -= r.first_chunks;
        r.body(r.count * chunk / r.chunks, r.count * (chunk + 1) / r.chunks);
      },
      &region);
}

}  // namespace yggdrasil
