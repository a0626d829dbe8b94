#include "cpu/api.h"

#include <string.h>

#include <initializer_list>

#include "common/codebooks.h"
#include "common/dtype.h"
#include "common/status.h"
#include "cpu/parallel.h"
#include "cpu/targets.h"

namespace {

thread_local const char* last_target = "";

bool IsDtype(int dtype) { return dtype == BNB_FP32 || dtype == BNB_FP16 || dtype == BNB_BF16; }
bool IsQuantType(int quant_type) { return quant_type == BNB_NF4 || quant_type == BNB_FP4; }
bool IsBlocksize4(int64_t blocksize) {
  return blocksize >= 32 && blocksize <= 4096 && (blocksize & (blocksize - 1)) == 0;
}
bool AreSizes(std::initializer_list<int64_t> sizes) {
  for (const int64_t size : sizes) {
    if (size < 0) return false;
  }
  return true;
}

// Runs one kernel of the active target if the arguments are valid.
template <typename... Parameters, typename... Arguments>
int Run(bool valid, void (*bnb::Kernels::*kernel)(Parameters...), Arguments... arguments) {
  if (!valid) return BNB_INVALID_ARGUMENT;
  const bnb::Kernels& kernels = bnb::ActiveKernels();
  last_target = kernels.name;
  (kernels.*kernel)(arguments...);
  return BNB_OK;
}

}  // namespace

const char* bnb_cpu_runnable_target(int i) { return bnb::RunnableTarget(i); }

int bnb_cpu_select_target(const char* name) {
  last_target = "";
  return bnb::SelectTarget(name) ? BNB_OK : BNB_UNKNOWN_TARGET;
}

const char* bnb_cpu_target() { return bnb::ActiveKernels().name; }
const char* bnb_cpu_last_target() { return last_target; }
const char* bnb_cpu_threading() { return bnb::ThreadingName(); }

int bnb_cpu_codebook(int quant_type, float* levels) {
  if (!IsQuantType(quant_type)) return BNB_INVALID_ARGUMENT;
  memcpy(levels, quant_type == BNB_NF4 ? bnb::kNF4 : bnb::kFP4, sizeof(bnb::kNF4));
  return BNB_OK;
}

int bnb_cpu_quantize_4bit(int dtype, int quant_type, int64_t blocksize, int64_t n, const void* a, uint8_t* packed,
                          float* absmax, int threads) {
  return Run(IsDtype(dtype) && IsQuantType(quant_type) && IsBlocksize4(blocksize) && AreSizes({n}),
             &bnb::Kernels::quantize_4bit, dtype, quant_type, blocksize, n, a, packed, absmax, threads);
}

int bnb_cpu_dequantize_4bit(int dtype, int quant_type, int64_t blocksize, int64_t n, const uint8_t* packed,
                            const float* absmax, void* out, int threads) {
  return Run(IsDtype(dtype) && IsQuantType(quant_type) && IsBlocksize4(blocksize) && AreSizes({n}),
             &bnb::Kernels::dequantize_4bit, dtype, quant_type, blocksize, n, packed, absmax, out, threads);
}

int bnb_cpu_int8_vectorwise_quant(int dtype, int64_t rows, int64_t columns, const void* a, float threshold,
                                  int8_t* codes, float* stats, uint8_t* outliers, int threads) {
  return Run(IsDtype(dtype) && AreSizes({rows, columns}), &bnb::Kernels::int8_vectorwise_quant, dtype, rows, columns, a,
             threshold, codes, stats, outliers, threads);
}

int bnb_cpu_int8_vectorwise_dequant(int64_t rows, int64_t columns, const int8_t* codes, const float* stats, float* out,
                                    int threads) {
  return Run(AreSizes({rows, columns}), &bnb::Kernels::int8_vectorwise_dequant, rows, columns, codes, stats, out,
             threads);
}

int bnb_cpu_int8_linear_matmul(int64_t m, int64_t n, int64_t k, const int8_t* a, const int8_t* b, int32_t* out,
                               int threads) {
  return Run(AreSizes({m, n, k}), &bnb::Kernels::int8_linear_matmul, m, n, k, a, b, out, threads);
}

int bnb_cpu_int8_mm_dequant(int dtype, int64_t m, int64_t n, const int32_t* product, const float* row_stats,
                            const float* col_stats, const float* bias, void* out, int threads) {
  return Run(IsDtype(dtype) && AreSizes({m, n}), &bnb::Kernels::int8_mm_dequant, dtype, m, n, product, row_stats,
             col_stats, bias, out, threads);
}

int bnb_cpu_int8_scaled_mm(int dtype, int64_t m, int64_t n, int64_t k, const int8_t* a, const int8_t* b,
                           const float* row_stats, const float* col_stats, const float* bias, int64_t outliers,
                           const int64_t* outlier_cols, const float* outlier_values, void* out, int threads) {
  return Run(IsDtype(dtype) && AreSizes({m, n, k, outliers}), &bnb::Kernels::int8_scaled_mm, dtype, m, n, k, a, b,
             row_stats, col_stats, bias, outliers, outlier_cols, outlier_values, out, threads);
}
