// The targets of this build, and the choice among them.
#pragma once

#include "cpu/kernels.h"

namespace bnb {

// The kernels in use. The first call chooses the best target that this machine runs, unless one was selected.
const Kernels& ActiveKernels();

// Selects a target by name; an empty name selects the best one. False if this machine does not run `name`.
bool SelectTarget(const char* name);

// Name of the i-th target that this machine runs, best first; null past the last.
const char* RunnableTarget(int i);

}  // namespace bnb
