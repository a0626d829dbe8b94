// The table of kernels that each target provides. Arguments are those of api.h, checked.
#pragma once

#include <stdint.h>

namespace bnb {

struct Kernels {
  const char* name;
  void (*quantize_4bit)(int dtype, int quant_type, int64_t blocksize, int64_t n, const void* a, uint8_t* packed,
                        float* absmax, int threads);
  void (*dequantize_4bit)(int dtype, int quant_type, int64_t blocksize, int64_t n, const uint8_t* packed,
                          const float* absmax, void* out, int threads);
  void (*int8_vectorwise_quant)(int dtype, int64_t rows, int64_t columns, const void* a, float threshold, int8_t* codes,
                                float* stats, uint8_t* outliers, int threads);
  void (*int8_vectorwise_dequant)(int64_t rows, int64_t columns, const int8_t* codes, const float* stats, float* out,
                                  int threads);
  void (*int8_linear_matmul)(int64_t m, int64_t n, int64_t k, const int8_t* a, const int8_t* b, int32_t* out,
                             int threads);
  void (*int8_mm_dequant)(int dtype, int64_t m, int64_t n, const int32_t* product, const float* row_stats,
                          const float* col_stats, const float* bias, void* out, int threads);
  void (*int8_scaled_mm)(int dtype, int64_t m, int64_t n, int64_t k, const int8_t* a, const int8_t* b,
                         const float* row_stats, const float* col_stats, const float* bias, int64_t outliers,
                         const int64_t* outlier_cols, const float* outlier_values, void* out, int threads);
};

}  // namespace bnb
