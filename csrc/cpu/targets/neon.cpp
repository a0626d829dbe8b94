#define HWY_COMPILE_ONLY_STATIC
#define BNB_TARGET neon
#include "cpu/kernels/all.h"
