#define HWY_COMPILE_ONLY_SCALAR
#define BNB_TARGET scalar
#include "cpu/kernels/all.h"
