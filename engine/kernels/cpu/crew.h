// The threads that share an operation's pieces. One leads: it runs the kernel from its first line to its last; the
// others lend a hand with whatever operation is under way.
//
// No thread is waited for, only pieces that a thread has begun: each takes pieces of its own share first and then what
// is left of others', so that a thread which has lost its core, has not woken yet, or does not exist at all (after a
// fork) holds up nothing but the piece in its hands. What a piece gives must not depend on who computes it.
//
// Waiting threads spin for some microseconds, as long as a step keeps them busy, and then sleep.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace crew {

constexpr int kMostThreads = 256, kMostPieces = (1 << 24) - 1;
constexpr int kSpins = 1000;  // some 17 us

// A thread's share of `count` things that stand in a row.
struct Share {
  int from, to;
  Share(int count, int thread, int num_threads)
      : from(int64_t(count) * thread / num_threads), to(int64_t(count) * (thread + 1) / num_threads) {}
};

// The next piece of a thread's share: the number of the operation, and in the lower 24 bits that of the piece.
struct alignas(64) Ticket {
  std::atomic<uint64_t> next{0};
  uint64_t operation() const { return next.load(std::memory_order_acquire) >> 24; }
};

// Pieces as one thread takes them.
class Pieces {
 public:
  // All `count` of them, in order.
  explicit Pieces(int count) : tickets(nullptr), operation(0), count(count), num_threads(1), thread(0) {}
  Pieces(Ticket* tickets, uint64_t operation, int count, int num_threads, int thread)
      : tickets(tickets), operation(operation), count(count), num_threads(num_threads), thread(thread) {}

  bool take(int& piece) {
    if (!tickets) return (piece = num_taken) < count ? ++num_taken : false;
    if (has_kept) {
      piece = kept, has_kept = false;
      return true;
    }
    for (; num_empty < num_threads; ++num_empty)
      if (take_from((thread + num_empty) % num_threads, piece)) return ++num_taken;
    return false;
  }

  // Whether there is a piece, which then waits to be taken.
  bool begin() { return has_kept = take(kept); }

  int taken() const { return num_taken; }

 private:
  Ticket* const tickets;
  const uint64_t operation;
  const int count, num_threads, thread;
  int num_taken = 0, num_empty = 0;  // shares that are empty, from this thread's own on
  int kept = 0;
  bool has_kept = false;

  // Fails for an operation that is over, whose tickets bear another number.
  bool take_from(int owner, int& piece) {
    std::atomic<uint64_t>& next = tickets[owner].next;
    const uint64_t last = operation << 24 | uint64_t(Share(count, owner, num_threads).to);
    uint64_t seen = next.load(std::memory_order_acquire);
    while (seen >> 24 == operation && seen < last)
      if (next.compare_exchange_weak(seen, seen + 1)) {
        piece = int(seen & kMostPieces);
        return true;
      }
    return false;
  }
};

class Crew {
 public:
  // Calls body(pieces) on this thread and on up to `num_threads` - 1 others, each of which takes pieces until there are
  // none; the others are called only if they have a piece. Returns when all pieces are done. Called on several threads
  // at once, all but one of them do their pieces alone.
  template <class Body> void share(int num_threads, int count, const Body& body) {
    num_threads = std::min({num_threads, count, kMostThreads});
    if (num_threads <= 1 || is_led.exchange(true, std::memory_order_acquire)) {
      Pieces all(count);
      return body(all);
    }
    hire(num_threads - 1);
    const auto call = [](const void* body, Pieces& pieces) { (*static_cast<const Body*>(body))(pieces); };
    const uint64_t operation = announce({call, &body, count, num_threads});
    Pieces mine(tickets, operation, count, num_threads, 0);
    body(mine);
    num_done.fetch_add(mine.taken());
    wait_for(count);
    is_led.store(false, std::memory_order_release);
  }

 private:
  struct Job {
    void (*call)(const void* body, Pieces&);
    const void* body;
    int count, num_threads;
  };
  // Two by turns: what a late thread reads of one may belong to the operation after the next, but then all tickets have
  // long had another number, and it gets no piece.
  struct Posted {
    std::atomic<void (*)(const void*, Pieces&)> call;
    std::atomic<const void*> body;
    std::atomic<int> count, num_threads;
  };

  Ticket tickets[kMostThreads];
  Posted posted[2];
  alignas(64) std::atomic<int> num_done{0};  // pieces of this operation
  alignas(64) std::atomic<int> news{0};      // operations, for those who sleep
  std::atomic<bool> is_led{false};
  int num_helpers = 0;
  uint64_t operation = 0;

  // Threads that are never joined: they sleep until the process ends.
  void hire(int count) {
    for (; num_helpers < count; ++num_helpers) std::thread(&Crew::help, this, num_helpers + 1).detach();
  }

  uint64_t announce(const Job& job) {
    Posted& post = posted[++operation % 2];
    post.call.store(job.call, std::memory_order_release);
    post.body.store(job.body, std::memory_order_release);
    post.count.store(job.count, std::memory_order_release);
    post.num_threads.store(job.num_threads, std::memory_order_release);
    num_done.store(0, std::memory_order_relaxed);
    for (int thread = 0; thread <= num_helpers; ++thread) {
      const int first = thread < job.num_threads ? Share(job.count, thread, job.num_threads).from : kMostPieces;
      tickets[thread].next.store(operation << 24 | uint64_t(first), std::memory_order_release);
    }
    news.fetch_add(1);
    news.notify_all();
    return operation;
  }

  void wait_for(int count) {
    for (int i = 0; i < kSpins; ++i) {
      if (num_done.load(std::memory_order_acquire) == count) return;
      pause();
    }
    for (int done; (done = num_done.load()) != count;) num_done.wait(done);
  }

  void help(int thread) {
    for (uint64_t last = 0;;) {
      wait_for_news(tickets[thread], last);
      last = tickets[thread].operation();
      const Posted& post = posted[last % 2];
      const auto call = post.call.load(std::memory_order_acquire);
      const void* const body = post.body.load(std::memory_order_acquire);
      const int count = post.count.load(std::memory_order_acquire);
      const int num_threads = post.num_threads.load(std::memory_order_acquire);
      if (thread >= num_threads) continue;
      Pieces pieces(tickets, last, count, num_threads, thread);
      if (!pieces.begin()) continue;
      call(body, pieces);
      if (num_done.fetch_add(pieces.taken()) + pieces.taken() == count) num_done.notify_one();
    }
  }

  void wait_for_news(const Ticket& ticket, uint64_t last) {
    for (int i = 0; i < kSpins; ++i) {
      if (ticket.operation() != last) return;
      pause();
    }
    for (int seen = news.load(); ticket.operation() == last; seen = news.load()) news.wait(seen);
  }

  static void pause() {
#if defined(__x86_64__)
    _mm_pause();
#else
    std::this_thread::yield();
#endif
  }
};

// Of this process. Never destroyed: its threads outlive everything.
inline Crew& of_process() {
  static Crew* const crew = new Crew;
  return *crew;
}

template <class Body> inline void share(int num_threads, int count, const Body& body) {
  of_process().share(num_threads, count, body);
}

}  // namespace crew
