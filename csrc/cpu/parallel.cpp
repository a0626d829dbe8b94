#include "cpu/parallel.h"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace bnb {
namespace {

// The entry of an OpenMP runtime: GCC's; LLVM's and Intel's have it as well.
using TeamFunction = void (*)(void (*function)(void*), void* data, unsigned threads, unsigned flags);

// The runtime that PyTorch has loaded, which is visible to the whole process. Its idle threads spin for a while: a pool
// beside it fights with them for the cores. On two cores SmolLM2-135M took 21.4 ms a token with threads of our own, and
// 17.5 with these.
TeamFunction OpenMP() {
  static const auto team = reinterpret_cast<TeamFunction>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  return team;
}

// Ranges are handed out on demand: a thread that the system does not run must not hold up the others' share.
constexpr int64_t kRangesPerThread = 4;

// A caller that has run out of ranges looks this often, some tens of microseconds in all, before it sleeps.
constexpr int kPatience = 1000;

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

struct Job {
  int64_t total, step;
  RangeFunction function;
  const void* context;
  int seats;  // helpers that may still join; guarded by the pool's mutex
  Job* after;
  std::atomic<int> helpers{0};  // at work; changes under the mutex
  std::atomic<int64_t> next{0};

  void Work() {
    for (;;) {
      const int64_t begin = next.fetch_add(step, std::memory_order_relaxed);
      if (begin >= total) return;
      function(context, begin, total - begin > step ? begin + step : total);
    }
  }
};

// Threads that sleep when there is nothing to do, for processes without OpenMP. A caller waits for the helpers that
// have taken a range, not for those that the system has yet to wake.
class Pool {
 public:
  void Run(Job* job) {
    int seats;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      while (size_ < job->seats && Start()) {
      }
      if (job->seats > size_) job->seats = size_;
      seats = job->seats;
      job->after = jobs_;
      jobs_ = job;
    }
    for (int i = 0; i < seats; ++i) work_.notify_one();
    job->Work();
    std::unique_lock<std::mutex> lock(mutex_);
    Job** link = &jobs_;
    while (*link != job) link = &(*link)->after;
    *link = job->after;  // nobody joins from here on
    lock.unlock();
    for (int i = 0; i < kPatience; ++i) {
      if (job->helpers.load(std::memory_order_acquire) == 0) return;
      Pause();
    }
    lock.lock();
    done_.wait(lock, [job] { return job->helpers.load(std::memory_order_relaxed) == 0; });
  }

 private:
  bool Start() {
    try {
      std::thread([this] { Serve(); }).detach();
    } catch (...) {
      return false;  // the system has no more threads: those there are do the work
    }
    ++size_;
    return true;
  }

  [[noreturn]] void Serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      Job* job = jobs_;
      while (job != nullptr && job->seats == 0) job = job->after;
      if (job == nullptr) {
        work_.wait(lock);
        continue;
      }
      --job->seats;
      job->helpers.fetch_add(1, std::memory_order_relaxed);
      lock.unlock();
      job->Work();
      lock.lock();
      // The caller may return, and its job end, as soon as this is 0.
      if (job->helpers.fetch_sub(1, std::memory_order_release) == 1) done_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable work_, done_;
  Job* jobs_ = nullptr;  // running calls
  int size_ = 0;         // helpers
};

// Never destroyed: helpers wait on it until the process ends. No lock guards it, as one that another thread holds
// during a fork would stay locked in the child.
std::atomic<Pool*> pool{nullptr};

// A forked child has none of the helpers. OpenMP does not notice, and would wait for its own for ever; so the child has
// a new pool of ours.
std::atomic<bool> forked{false};
void Forget() {
  pool.store(nullptr);
  forked.store(true);
}
const int registered = pthread_atfork(nullptr, nullptr, Forget);

Pool* ThePool() {
  Pool* found = pool.load(std::memory_order_acquire);
  if (found != nullptr) return found;
  Pool* made = new Pool;
  if (pool.compare_exchange_strong(found, made)) return made;
  delete made;  // another thread was faster
  return found;
}

bool UseOpenMP() { return registered == 0 && !forked.load(std::memory_order_relaxed) && OpenMP() != nullptr; }

}  // namespace

void ParallelFor(int64_t total, int64_t grain, int threads, RangeFunction function, const void* context) {
  if (total <= 0) return;
  if (threads <= 1 || total <= grain) return function(context, 0, total);
  int64_t pieces = static_cast<int64_t>(threads) * kRangesPerThread;
  if (total / pieces < grain) pieces = (total + grain - 1) / grain;
  if (pieces > threads) pieces -= pieces % threads;  // the same number for each
  Job job{};
  job.total = total;
  job.step = (total + pieces - 1) / pieces;
  job.function = function;
  job.context = context;
  const int64_t ranges = (total + job.step - 1) / job.step;
  job.seats = static_cast<int>(ranges < threads ? ranges : threads) - 1;
  if (UseOpenMP()) {
    OpenMP()([](void* data) { static_cast<Job*>(data)->Work(); }, &job, static_cast<unsigned>(job.seats) + 1, 0);
  } else {
    ThePool()->Run(&job);
  }
}

const char* ThreadingName() {
  return UseOpenMP() ? "the OpenMP runtime that PyTorch uses" : "threads of the library's own";
}

}  // namespace bnb
