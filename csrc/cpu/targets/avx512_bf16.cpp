#define HWY_COMPILE_ONLY_STATIC
#define BNB_TARGET avx512_bf16
#include "cpu/kernels/all.h"
