// The table of kernels that each target provides. Arguments are those of api.h, checked.
#pragma once

#include <stdint.h>

namespace bnb {

struct Kernels {
  const char* name;
  void (*quantize_4bit)(int dtype, int quant_type, int64_t blocksize, int64_t n, const void* a, uint8_t* packed,
                        float* absmax, int threads);
  void (*dequantize_4bit)(int dtype, const float* levels, int64_t blocksize, int64_t n, const uint8_t* packed,
                          const float* absmax, void* out, int threads);
  int (*gemm_4bit)(int dtype, const float* levels, int64_t blocksize, int64_t m, int64_t n, int64_t k, const void* a,
                   const uint8_t* packed, const float* absmax, const uint8_t* absmax_8bit, const float* absmax_code,
                   float absmax_offset, const void* bias, void* out, int threads);
  int (*decode_rows_4bit)(int dtype, const float* levels, int64_t blocksize, int64_t rows, int64_t width,
                          const uint8_t* packed, const float* absmax, const uint8_t* absmax_8bit,
                          const float* absmax_code, float absmax_offset, const int64_t* indices, int64_t first,
                          int64_t count, void* out, int threads);
  void (*quantize_blockwise)(int dtype, int64_t blocksize, int64_t n, const void* a, const float* levels,
                             uint8_t* codes, float* absmax, int threads);
  void (*dequantize_blockwise)(int dtype, int64_t blocksize, int64_t n, const uint8_t* codes, const float* absmax,
                               const float* levels, void* out, int threads);
  void (*int8_vectorwise_quant)(int dtype, int64_t rows, int64_t columns, const void* a, float threshold, int8_t* codes,
                                float* stats, uint8_t* outliers, int threads);
  int (*int8_vectorwise_dequant)(int dtype, int64_t rows, int64_t columns, const int8_t* codes, const float* stats,
                                 const int64_t* indices, int64_t count, void* out, int threads);
  void (*int8_linear_matmul)(int64_t m, int64_t n, int64_t k, const int8_t* a, const int8_t* b, int32_t* out,
                             int threads);
  void (*int8_mm_dequant)(int dtype, int64_t m, int64_t n, const int32_t* product, const float* row_stats,
                          const float* col_stats, const float* bias, void* out, int threads);
  void (*int8_scaled_mm)(int dtype, int64_t m, int64_t n, int64_t k, const int8_t* a, const int8_t* b,
                         const float* row_stats, const float* col_stats, const float* bias, int64_t outliers,
                         const int64_t* outlier_cols, const float* outlier_values, void* out, int threads);
};

}  // namespace bnb
