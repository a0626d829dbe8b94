/* The C interface of libbitsandbytes_cpu.
 *
 * Tensors are contiguous and row-major. Sizes are 64-bit. A dtype is a value of bnb_dtype, a quant_type one of
 * bnb_quant_type. `threads` bounds the threads of one call; small inputs use one. Every operator returns a bnb_status
 * and checks sizes and enumerations before it touches memory; pointers may be null where a size is 0. Inputs are never
 * written. Results are those of docs/numerics.md.
 */
#ifndef BITSANDBYTES_CPU_API_H_
#define BITSANDBYTES_CPU_API_H_

#include <stdint.h>

#define BNB_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

/* --- Targets ---------------------------------------------------------------------------------------------------- */

/* The i-th target that this machine runs, best first; null past the last. */
BNB_API const char* bnb_cpu_runnable_target(int i);
/* Uses one of them from now on, for the whole process; "" for the best. Otherwise BNB_UNKNOWN_TARGET. */
BNB_API int bnb_cpu_select_target(const char* name);
/* The target in use. */
BNB_API const char* bnb_cpu_target(void);
/* The target that ran the last operator of this thread since the last selection; "" if none did. */
BNB_API const char* bnb_cpu_last_target(void);
/* What runs the threads, in words. */
BNB_API const char* bnb_cpu_threading(void);
/* Asks the system for large pages in fresh memory that is about to be written as a whole: of a new tensor of 64 MiB,
 * page faults took 25 ms, and decoding into it 2.5 ms (AMD EPYC, two threads). Where it is refused, nothing happens. */
BNB_API void bnb_cpu_use_large_pages(void* begin, int64_t bytes);
/* The 16 levels of a 4-bit type, in code order. */
BNB_API int bnb_cpu_codebook(int quant_type, float* levels);

/* --- 4-bit ------------------------------------------------------------------------------------------------------ */

/* n values of `dtype` -> (n + 1) / 2 bytes and ceil(n / blocksize) scales. blocksize: 32, 64, ..., 4096. */
BNB_API int bnb_cpu_quantize_4bit(int dtype, int quant_type, int64_t blocksize, int64_t n, const void* a,
                                  uint8_t* packed, float* absmax, int threads);
/* The reverse. */
BNB_API int bnb_cpu_dequantize_4bit(int dtype, int quant_type, int64_t blocksize, int64_t n, const uint8_t* packed,
                                    const float* absmax, void* out, int threads);
/* out[m, n] = a[m, k] @ w[n, k].T + bias[n], accumulated in fp32; a, bias (or null) and out of `dtype`. `code` replaces
 * the 16 levels of quant_type unless it is null. With absmax_8bit, absmax holds the scales of its blocks of 256 and the
 * scale of block i is absmax_code[absmax_8bit[i]] * absmax[i / 256] + absmax_offset. */
BNB_API int bnb_cpu_gemm_4bit(int dtype, int quant_type, const float* code, int64_t blocksize, int64_t m, int64_t n,
                              int64_t k, const void* a, const uint8_t* packed, const float* absmax,
                              const uint8_t* absmax_8bit, const float* absmax_code, float absmax_offset,
                              const void* bias, void* out, int threads);
/* Rows of a table of [rows, width], decoded to [count, width]: those of `indices`, or, if that is null, the rows from
 * `first` on. Statistics as above. BNB_INDEX_OUT_OF_RANGE if a row does not exist. */
BNB_API int bnb_cpu_decode_rows_4bit(int dtype, int quant_type, const float* code, int64_t blocksize, int64_t rows,
                                     int64_t width, const uint8_t* packed, const float* absmax,
                                     const uint8_t* absmax_8bit, const float* absmax_code, float absmax_offset,
                                     const int64_t* indices, int64_t first, int64_t count, void* out, int threads);

/* --- 8-bit blockwise -------------------------------------------------------------------------------------------- */

/* n values of `dtype` -> n codes and ceil(n / blocksize) scales. levels: 256, ascending. blocksize: any positive. */
BNB_API int bnb_cpu_quantize_blockwise(int dtype, int64_t blocksize, int64_t n, const void* a, const float* levels,
                                       uint8_t* codes, float* absmax, int threads);
/* The reverse. */
BNB_API int bnb_cpu_dequantize_blockwise(int dtype, int64_t blocksize, int64_t n, const uint8_t* codes,
                                         const float* absmax, const float* levels, void* out, int threads);

/* --- LLM.int8() ------------------------------------------------------------------------------------------------- */

/* Rows of `dtype` -> codes and the absmax of each row. `outliers` is null, or a byte a column, which becomes 1 where
 * the column holds a magnitude of at least `threshold`; the caller clears it. Codes of such columns are undefined. */
BNB_API int bnb_cpu_int8_vectorwise_quant(int dtype, int64_t rows, int64_t columns, const void* a, float threshold,
                                          int8_t* codes, float* stats, uint8_t* outliers, int threads);
/* The reverse, without outliers, for the rows `indices`, or, if that is null, the first `count`, as `dtype`.
 * BNB_INDEX_OUT_OF_RANGE if a row does not exist. */
BNB_API int bnb_cpu_int8_vectorwise_dequant(int dtype, int64_t rows, int64_t columns, const int8_t* codes,
                                            const float* stats, const int64_t* indices, int64_t count, void* out,
                                            int threads);
/* (m, k) times the transpose of (n, k), modulo 2^32. */
BNB_API int bnb_cpu_int8_linear_matmul(int64_t m, int64_t n, int64_t k, const int8_t* a, const int8_t* b, int32_t* out,
                                       int threads);
/* An (m, n) product of codes -> `dtype`. `bias` is null or n values. */
BNB_API int bnb_cpu_int8_mm_dequant(int dtype, int64_t m, int64_t n, const int32_t* product, const float* row_stats,
                                    const float* col_stats, const float* bias, void* out, int threads);
/* The two in one. Of the `outliers` columns of A at `outlier_cols`, all below k, the values (m, outliers) times the
 * decoded columns of b are added in fp32. */
BNB_API int bnb_cpu_int8_scaled_mm(int dtype, int64_t m, int64_t n, int64_t k, const int8_t* a, const int8_t* b,
                                   const float* row_stats, const float* col_stats, const float* bias, int64_t outliers,
                                   const int64_t* outlier_cols, const float* outlier_values, void* out, int threads);

#ifdef __cplusplus
}
#endif

#endif /* BITSANDBYTES_CPU_API_H_ */
