#define HWY_COMPILE_ONLY_STATIC
#define BNB_TARGET neon_dotprod
#include "cpu/kernels/all.h"
