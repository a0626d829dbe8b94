// What kernels include for the Ascend C API. This is a host implementation of exactly the part that they use, for A2
// (dav-2201), which checks every call and keeps a model of the time. README.md says what it shows and what it cannot.
#pragma once

#include "sim/vector.h"
