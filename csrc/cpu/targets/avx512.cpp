#define HWY_COMPILE_ONLY_STATIC
#define BNB_TARGET avx512
#include "cpu/kernels/all.h"
