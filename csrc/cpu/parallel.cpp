#include "cpu/parallel.h"

#include <dlfcn.h>

#include <atomic>
#include <thread>
#include <vector>

namespace bnb {
namespace {

// GCC's OpenMP interface; LLVM's and Intel's runtimes offer it as well.
using TeamFunction = void (*)(void (*function)(void*), void* data, unsigned threads, unsigned flags);

// The runtime that PyTorch uses is visible to the whole process: PyTorch opens it so. Linking to OpenMP would bring a
// second pool, whose idle threads and PyTorch's spin against each other for the same cores.
TeamFunction OpenMP() {
  static const auto team = reinterpret_cast<TeamFunction>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  return team;
}

// Ranges are handed out on demand: on a loaded machine a thread that is not scheduled must not hold up the others.
constexpr int64_t kRangesPerThread = 4;

struct Team {
  int64_t total, step;
  RangeFunction function;
  const void* context;
  std::atomic<int64_t> next{0};
};

void Work(void* data) {
  Team& team = *static_cast<Team*>(data);
  for (;;) {
    const int64_t begin = team.next.fetch_add(team.step, std::memory_order_relaxed);
    if (begin >= team.total) return;
    const int64_t end = team.total - begin > team.step ? begin + team.step : team.total;
    team.function(team.context, begin, end);
  }
}

void OwnThreads(Team* team, int threads) {
  std::vector<std::thread> helpers;
  for (int i = 1; i < threads; ++i) {
    try {
      helpers.emplace_back(Work, team);
    } catch (...) {
      break;  // no more threads to be had: those there are do the work
    }
  }
  Work(team);
  for (std::thread& helper : helpers) helper.join();
}

}  // namespace

void ParallelFor(int64_t total, int64_t grain, int threads, RangeFunction function, const void* context) {
  if (total <= 0) return;
  if (threads <= 1 || total <= grain) return function(context, 0, total);
  const int64_t pieces = static_cast<int64_t>(threads) * kRangesPerThread;
  const int64_t even = (total + pieces - 1) / pieces;
  Team team{total, even > grain ? even : grain, function, context};
  const int64_t ranges = (total + team.step - 1) / team.step;
  if (ranges < threads) threads = static_cast<int>(ranges);
  if (const TeamFunction start = OpenMP()) {
    start(Work, &team, static_cast<unsigned>(threads), 0);
  } else {
    OwnThreads(&team, threads);
  }
}

const char* ThreadingName() { return OpenMP() ? "the process's OpenMP runtime" : "own threads, one team a call"; }

}  // namespace bnb
