#include "cpu/api.h"

#include <string.h>
#include <sys/mman.h>

#include <initializer_list>
#include <type_traits>

#include "common/codebooks.h"
#include "common/dtype.h"
#include "common/status.h"
#include "cpu/parallel.h"
#include "cpu/targets.h"

namespace {

thread_local const char* last_target = "";

bool IsDtype(int dtype) { return dtype == BNB_FP32 || dtype == BNB_FP16 || dtype == BNB_BF16; }
bool IsQuantType(int quant_type) { return quant_type == BNB_NF4 || quant_type == BNB_FP4; }
const float* Levels(int quant_type, const float* code) {
  return code != nullptr ? code : quant_type == BNB_NF4 ? bnb::kNF4 : bnb::kFP4;
}
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
template <typename Result, typename... Parameters, typename... Arguments>
int Run(bool valid, Result (*bnb::Kernels::*kernel)(Parameters...), Arguments... arguments) {
  if (!valid) return BNB_INVALID_ARGUMENT;
  const bnb::Kernels& kernels = bnb::ActiveKernels();
  last_target = kernels.name;
  if constexpr (std::is_void_v<Result>) {
    (kernels.*kernel)(arguments...);
    return BNB_OK;
  } else {
    return (kernels.*kernel)(arguments...);
  }
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

void bnb_cpu_use_large_pages(void* begin, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = uintptr_t{1} << 21;
  const auto address = reinterpret_cast<uintptr_t>(begin);
  const uintptr_t first = (address + kPage - 1) / kPage * kPage,
                  last = (address + static_cast<uintptr_t>(bytes)) / kPage * kPage;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
  (void)begin, (void)bytes;
#endif
}

int bnb_cpu_codebook(int quant_type, float* levels) {
  if (!IsQuantType(quant_type)) return BNB_INVALID_ARGUMENT;
  memcpy(levels, Levels(quant_type, nullptr), sizeof(bnb::kNF4));
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
             &bnb::Kernels::dequantize_4bit, dtype, Levels(quant_type, nullptr), blocksize, n, packed, absmax, out,
             threads);
}

int bnb_cpu_gemm_4bit(int dtype, int quant_type, const float* code, int64_t blocksize, int64_t m, int64_t n, int64_t k,
                      const void* a, const uint8_t* packed, const float* absmax, const uint8_t* absmax_8bit,
                      const float* absmax_code, float absmax_offset, const void* bias, void* out, int threads) {
  return Run(IsDtype(dtype) && IsQuantType(quant_type) && IsBlocksize4(blocksize) && AreSizes({m, n, k}),
             &bnb::Kernels::gemm_4bit, dtype, Levels(quant_type, code), blocksize, m, n, k, a, packed, absmax,
             absmax_8bit, absmax_code, absmax_offset, bias, out, threads);
}

int bnb_cpu_decode_rows_4bit(int dtype, int quant_type, const float* code, int64_t blocksize, int64_t rows,
                             int64_t width, const uint8_t* packed, const float* absmax, const uint8_t* absmax_8bit,
                             const float* absmax_code, float absmax_offset, const int64_t* indices, int64_t first,
                             int64_t count, void* out, int threads) {
  const bool valid = IsDtype(dtype) && IsQuantType(quant_type) && IsBlocksize4(blocksize) &&
                     AreSizes({rows, width, first, count}) && (indices != nullptr || count <= rows - first);
  return Run(valid, &bnb::Kernels::decode_rows_4bit, dtype, Levels(quant_type, code), blocksize, rows, width, packed,
             absmax, absmax_8bit, absmax_code, absmax_offset, indices, first, count, out, threads);
}

int bnb_cpu_quantize_blockwise(int dtype, int64_t blocksize, int64_t n, const void* a, const float* levels,
                               uint8_t* codes, float* absmax, int threads) {
  return Run(IsDtype(dtype) && blocksize > 0 && AreSizes({n}), &bnb::Kernels::quantize_blockwise, dtype, blocksize, n,
             a, levels, codes, absmax, threads);
}

int bnb_cpu_dequantize_blockwise(int dtype, int64_t blocksize, int64_t n, const uint8_t* codes, const float* absmax,
                                 const float* levels, void* out, int threads) {
  return Run(IsDtype(dtype) && blocksize > 0 && AreSizes({n}), &bnb::Kernels::dequantize_blockwise, dtype, blocksize, n,
             codes, absmax, levels, out, threads);
}

int bnb_cpu_int8_vectorwise_quant(int dtype, int64_t rows, int64_t columns, const void* a, float threshold,
                                  int8_t* codes, float* stats, uint8_t* outliers, int threads) {
  return Run(IsDtype(dtype) && AreSizes({rows, columns}), &bnb::Kernels::int8_vectorwise_quant, dtype, rows, columns, a,
             threshold, codes, stats, outliers, threads);
}

int bnb_cpu_int8_vectorwise_dequant(int dtype, int64_t rows, int64_t columns, const int8_t* codes, const float* stats,
                                    const int64_t* indices, int64_t count, void* out, int threads) {
  const bool valid = IsDtype(dtype) && AreSizes({rows, columns, count}) && (indices != nullptr || count <= rows);
  return Run(valid, &bnb::Kernels::int8_vectorwise_dequant, dtype, rows, columns, codes, stats, indices, count, out,
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
