// A team of threads that shares the tasks of one parallel operation at a time. The calling thread runs the whole
// kernel; workers join the operation that is in flight.
//
// The caller never waits for a thread, only for tasks that a thread has begun: each thread takes the tasks of its own
// share first and then those left in other shares. A thread that has lost its core, has not woken yet, or does not
// exist (after a fork) delays only the task it has begun. A task's result must not depend on the thread that computes
// it.
//
// Waiting threads spin for some microseconds, the pause between operations of a step, and then sleep.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace thread_team {

constexpr int kMaxThreads = 256, kMaxTasks = (1 << 24) - 1;
constexpr int kSpins = 1000;  // about 17 us

// A thread's share of `count` consecutive tasks.
struct Share {
  int from, to;
  Share(int count, int thread, int num_threads)
      : from(int64_t(count) * thread / num_threads), to(int64_t(count) * (thread + 1) / num_threads) {}
};

// The next task of a thread's share: the number of the operation in the upper bits, the task in the lower 24.
struct alignas(64) TaskCursor {
  std::atomic<uint64_t> next{0};
  uint64_t operation() const { return next.load(std::memory_order_acquire) >> 24; }
};

// The tasks of an operation, as one thread takes them.
class Tasks {
 public:
  // All `count` tasks in order, for a thread that works by itself.
  explicit Tasks(int count) : cursors(nullptr), operation(0), count(count), num_threads(1), thread(0) {}
  Tasks(TaskCursor* cursors, uint64_t operation, int count, int num_threads, int thread)
      : cursors(cursors), operation(operation), count(count), num_threads(num_threads), thread(thread) {}

  bool take(int& task) {
    if (!cursors) return (task = num_taken) < count ? ++num_taken : false;
    if (has_peeked) {
      task = peeked, has_peeked = false;
      return true;
    }
    for (; num_empty < num_threads; ++num_empty)
      if (take_from((thread + num_empty) % num_threads, task)) return ++num_taken;
    return false;
  }

  // Returns whether a task is left; the next `take` returns it.
  bool peek() { return has_peeked = take(peeked); }

  int taken() const { return num_taken; }

 private:
  TaskCursor* const cursors;
  const uint64_t operation;
  const int count, num_threads, thread;
  int num_taken = 0, num_empty = 0;  // num_empty: shares found empty, counted from this thread's own
  int peeked = 0;
  bool has_peeked = false;

  // Returns false once the operation is over: its cursors then have another operation's number.
  bool take_from(int owner, int& task) {
    std::atomic<uint64_t>& next = cursors[owner].next;
    const uint64_t last = operation << 24 | uint64_t(Share(count, owner, num_threads).to);
    uint64_t seen = next.load(std::memory_order_acquire);
    while (seen >> 24 == operation && seen < last)
      if (next.compare_exchange_weak(seen, seen + 1)) {
        task = int(seen & kMaxTasks);
        return true;
      }
    return false;
  }
};

class ThreadTeam {
 public:
  // Calls body(tasks) on this thread and on up to `num_threads` - 1 workers; each takes tasks until none are left.
  // Workers without a task do not call it. Returns when all tasks are done. If several threads call this at once, the
  // first one gets the workers and the others compute by themselves.
  template <class Body> void parallel_for(int num_threads, int count, const Body& body) {
    num_threads = std::min({num_threads, count, kMaxThreads});
    if (num_threads <= 1 || is_busy.exchange(true, std::memory_order_acquire)) {
      Tasks all(count);
      return body(all);
    }
    spawn_workers(num_threads - 1);
    const auto call = [](const void* body, Tasks& tasks) { (*static_cast<const Body*>(body))(tasks); };
    const uint64_t operation = publish({call, &body, count, num_threads});
    Tasks mine(cursors, operation, count, num_threads, 0);
    body(mine);
    num_done.fetch_add(mine.taken());
    wait_for(count);
    is_busy.store(false, std::memory_order_release);
  }

 private:
  struct Operation {
    void (*call)(const void* body, Tasks&);
    const void* body;
    int count, num_threads;
  };
  // Two, used alternately. A late worker may read fields of the operation after the next one, but by then all cursors
  // have another number, so it gets no task.
  struct Posted {
    std::atomic<void (*)(const void*, Tasks&)> call;
    std::atomic<const void*> body;
    std::atomic<int> count, num_threads;
  };

  TaskCursor cursors[kMaxThreads];
  Posted posted[2];
  alignas(64) std::atomic<int> num_done{0};  // tasks of this operation
  alignas(64) std::atomic<int> num_published{0};  // operations; sleeping workers wait on it
  std::atomic<bool> is_busy{false};
  int num_workers = 0;
  uint64_t operation = 0;

  // Starts threads that are never joined: they sleep until the process ends.
  void spawn_workers(int count) {
    for (; num_workers < count; ++num_workers) std::thread(&ThreadTeam::work, this, num_workers + 1).detach();
  }

  uint64_t publish(const Operation& published) {
    Posted& post = posted[++operation % 2];
    post.call.store(published.call, std::memory_order_release);
    post.body.store(published.body, std::memory_order_release);
    post.count.store(published.count, std::memory_order_release);
    post.num_threads.store(published.num_threads, std::memory_order_release);
    num_done.store(0, std::memory_order_relaxed);
    for (int thread = 0; thread <= num_workers; ++thread) {
      const bool has_share = thread < published.num_threads;
      const int first = has_share ? Share(published.count, thread, published.num_threads).from : kMaxTasks;
      cursors[thread].next.store(operation << 24 | uint64_t(first), std::memory_order_release);
    }
    num_published.fetch_add(1);
    num_published.notify_all();
    return operation;
  }

  void wait_for(int count) {
    for (int i = 0; i < kSpins; ++i) {
      if (num_done.load(std::memory_order_acquire) == count) return;
      pause();
    }
    for (int done; (done = num_done.load()) != count;) num_done.wait(done);
  }

  void work(int thread) {
    for (uint64_t last = 0;;) {
      wait_for_operation(cursors[thread], last);
      last = cursors[thread].operation();
      const Posted& post = posted[last % 2];
      const auto call = post.call.load(std::memory_order_acquire);
      const void* const body = post.body.load(std::memory_order_acquire);
      const int count = post.count.load(std::memory_order_acquire);
      const int num_threads = post.num_threads.load(std::memory_order_acquire);
      if (thread >= num_threads) continue;
      Tasks tasks(cursors, last, count, num_threads, thread);
      if (!tasks.peek()) continue;
      call(body, tasks);
      if (num_done.fetch_add(tasks.taken()) + tasks.taken() == count) num_done.notify_one();
    }
  }

  void wait_for_operation(const TaskCursor& cursor, uint64_t last) {
    for (int i = 0; i < kSpins; ++i) {
      if (cursor.operation() != last) return;
      pause();
    }
    for (int seen = num_published.load(); cursor.operation() == last; seen = num_published.load())
      num_published.wait(seen);
  }

  static void pause() {
#if defined(__x86_64__)
    _mm_pause();
#else
    std::this_thread::yield();
#endif
  }
};

// The team of this process. Never destroyed, because its threads outlive static destruction.
inline ThreadTeam& process_team() {
  static ThreadTeam* const team = new ThreadTeam;
  return *team;
}

template <class Body> inline void parallel_for(int num_threads, int count, const Body& body) {
  process_team().parallel_for(num_threads, count, body);
}

}  // namespace thread_team
