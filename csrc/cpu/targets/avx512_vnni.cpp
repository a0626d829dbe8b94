#define HWY_COMPILE_ONLY_STATIC
#define BNB_TARGET avx512_vnni
#include "cpu/kernels/all.h"
