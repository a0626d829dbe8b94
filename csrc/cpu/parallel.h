// Work sharing: on the threads of the process's OpenMP runtime, which PyTorch uses, or on threads of the library's own.
#pragma once

#include <stdint.h>

namespace bnb {

using RangeFunction = void (*)(const void* context, int64_t begin, int64_t end);

// Calls `function` on ranges that together cover [0, total), on at most `threads` threads, the caller's among them;
// none is shorter than `grain`, save the last. Returns when all are done.
void ParallelFor(int64_t total, int64_t grain, int threads, RangeFunction function, const void* context);

// What runs the threads, in words.
const char* ThreadingName();

}  // namespace bnb
