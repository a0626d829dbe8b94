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
  void (*quantize_blockwise)(int dtype, int64_t blocksize, int64_t n, const void* a, const float* levels,
                             uint8_t* codes, float* absmax, int threads);
  void (*dequantize_blockwise)(int dtype, int64_t blocksize, int64_t n, const uint8_t* codes, const float* absmax,
                               const float* levels, void* out, int threads);
};

}  // namespace bnb
