// The kernels on the simulated chip as functions for ctypes: each makes the tiling as the launcher does, copies the
// arguments between inaccessible pages, launches, and copies the output back.
#include "common/codebooks.h"
#include "common/dtype.h"
#include "npu/tiling.h"
#include "sim/device.h"

using namespace bnb::npu;

#define BNB_DECLARE(name, ...)                    \
  extern "C" void bnb_##name##_fp32(__VA_ARGS__); \
  extern "C" void bnb_##name##_fp16(__VA_ARGS__); \
  extern "C" void bnb_##name##_bf16(__VA_ARGS__);
#define BNB_OF_DTYPE(name, dtype) \
  ((dtype) == BNB_FP32 ? bnb_##name##_fp32 : (dtype) == BNB_FP16 ? bnb_##name##_fp16 : bnb_##name##_bf16)

BNB_DECLARE(dequantize_4bit, GM_ADDR packed, GM_ADDR absmax, GM_ADDR codes, GM_ADDR map, GM_ADDR offset, GM_ADDR out,
            Dequantize4bitTiling tiling)

BNB_DECLARE(gemv_4bit, GM_ADDR a, GM_ADDR packed, GM_ADDR absmax, GM_ADDR codes, GM_ADDR map, GM_ADDR offset,
            GM_ADDR out, Gemv4bitTiling tiling)
BNB_DECLARE(dequantize_blockwise, GM_ADDR codes, GM_ADDR absmax, GM_ADDR map, GM_ADDR out,
            DequantizeBlockwiseTiling tiling)
BNB_DECLARE(quantize_blockwise, GM_ADDR values, GM_ADDR points, GM_ADDR codes, GM_ADDR absmax,
            QuantizeBlockwiseTiling tiling)
BNB_DECLARE(quantize_4bit, GM_ADDR values, GM_ADDR packed, GM_ADDR absmax, Quantize4bitTiling tiling)

namespace {

// Where and how a call runs.
struct Options {
  uint32_t cores;
  uint32_t ub_bytes;
  int32_t at_end;      // the data ends, or else begins, at an inaccessible page
  int32_t only_block;  // runs one block alone, for its modelled time; -1 runs all
};

struct Result {
  double cycles, bound;
  double busy[sim::kPipes];
  uint32_t cores, tile;
  char error[640];
};

class Call {
 public:
  Call(const Options* options, Result* result) : options_(*options), result_(result), device_(Chip(*options)) {}

  Platform platform() const { return {options_.cores, options_.ub_bytes}; }
  uint8_t* In(const void* data, int64_t bytes) {
    return data == nullptr ? nullptr : device_.memory().Input(data, static_cast<uint64_t>(bytes), options_.at_end != 0);
  }
  uint8_t* Out(void* data, int64_t bytes) {
    outputs_.push_back({device_.memory().Output(static_cast<uint64_t>(bytes), options_.at_end != 0), data,
                        static_cast<uint64_t>(bytes)});
    return outputs_.back().from;
  }
  // 0 if the kernel kept every rule.
  int Run(const char* kernel, const Shares& shares, uint32_t tile, std::function<void()> body) {
    result_->cores = shares.cores;
    result_->tile = tile;
    try {
      device_.Launch(kernel, shares.cores, std::move(body));
      const sim::Report report = device_.Synchronise(options_.only_block);
      result_->cycles = report.cycles;
      result_->bound = report.bound;
      std::copy(report.busy.begin(), report.busy.end(), result_->busy);
    } catch (const sim::Violation& violation) {
      snprintf(result_->error, sizeof(result_->error), "%s", violation.what());
      return 1;
    }
    for (const Output& output : outputs_) std::memcpy(output.to, output.from, output.bytes);
    return 0;
  }

 private:
  struct Output {
    uint8_t* from;
    void* to;
    uint64_t bytes;
  };
  static sim::Chip Chip(const Options& options) {
    sim::Chip chip = sim::kAscend910B3;
    chip.cores = options.cores;
    chip.ub_bytes = options.ub_bytes;
    return chip;
  }
  const Options options_;
  Result* result_;
  sim::Device device_;
  std::vector<Output> outputs_;
};

}  // namespace

#define BNB_EXPORT extern "C" __attribute__((visibility("default")))

// Nested statistics if `codes` is not null. The sizes are those that the operator asks of its caller.
BNB_EXPORT int bnb_sim_dequantize_4bit(const Options* options, Result* result, int dtype, int quant_type, int64_t n,
                                       uint32_t blocksize, const void* packed, const void* absmax, const void* codes,
                                       const void* map, const void* offset, void* out) {
  Call call(options, result);
  const int64_t size = dtype == BNB_FP32 ? 4 : 2, blocks = CeilDiv(n, blocksize);
  const bool nested = codes != nullptr;
  const auto tiling = TileDequantize4bit(n, blocksize, static_cast<uint32_t>(size), nested,
                                         quant_type == BNB_NF4 ? bnb::kNF4 : bnb::kFP4, call.platform());
  const auto a = call.In(packed, CeilDiv(n, 2)),
             b = call.In(absmax, (nested ? CeilDiv(blocks, kNestedBlock) : blocks) * 4), c = call.In(codes, blocks),
             m = call.In(map, kMapSize * 4), d = call.In(offset, 4), o = call.Out(out, n * size);
  const auto kernel = BNB_OF_DTYPE(dequantize_4bit, dtype);
  return call.Run("dequantize_4bit", tiling.shares, tiling.decode.tile, [=] { kernel(a, b, c, m, d, o, tiling); });
}

BNB_EXPORT int bnb_sim_quantize_4bit(const Options* options, Result* result, int dtype, int quant_type, int64_t n,
                                     uint32_t blocksize, const void* values, void* packed, void* absmax) {
  Call call(options, result);
  const int64_t size = dtype == BNB_FP32 ? 4 : 2;
  float points[kPoints4] = {};
  const bool fp4 = quant_type == BNB_FP4;
  for (int i = 0; i < (fp4 ? bnb::kSignFP4 - 1 : bnb::kLevels - 1); ++i) {
    points[i] = fp4 ? bnb::PointFP4(i) : bnb::PointNF4(i);
  }
  const auto tiling = TileQuantize4bit(n, blocksize, static_cast<uint32_t>(size), fp4, points, call.platform());
  const auto v = call.In(values, n * size), p = call.Out(packed, CeilDiv(n, 2)),
             a = call.Out(absmax, CeilDiv(n, blocksize) * 4);
  const auto kernel = BNB_OF_DTYPE(quantize_4bit, dtype);
  return call.Run("quantize_4bit", tiling.shares, tiling.tile, [=] { kernel(v, p, a, tiling); });
}

BNB_EXPORT int bnb_sim_dequantize_blockwise(const Options* options, Result* result, int dtype, int64_t n,
                                            uint32_t blocksize, const void* codes, const void* absmax, const void* map,
                                            void* out) {
  Call call(options, result);
  const int64_t size = dtype == BNB_FP32 ? 4 : 2;
  const auto tiling = TileDequantizeBlockwise(n, blocksize, static_cast<uint32_t>(size), call.platform());
  const auto c = call.In(codes, n), a = call.In(absmax, CeilDiv(n, blocksize) * 4), m = call.In(map, kMapSize * 4),
             o = call.Out(out, n * size);
  const auto kernel = BNB_OF_DTYPE(dequantize_blockwise, dtype);
  return call.Run("dequantize_blockwise", tiling.shares, tiling.tile, [=] { kernel(c, a, m, o, tiling); });
}

BNB_EXPORT int bnb_sim_quantize_blockwise(const Options* options, Result* result, int dtype, int64_t n,
                                          uint32_t blocksize, const void* values, const void* points, void* codes,
                                          void* absmax) {
  Call call(options, result);
  const int64_t size = dtype == BNB_FP32 ? 4 : 2;
  const auto tiling = TileQuantizeBlockwise(n, blocksize, static_cast<uint32_t>(size), call.platform());
  const auto v = call.In(values, n * size), p = call.In(points, (kMapSize - 1) * 4), c = call.Out(codes, n),
             a = call.Out(absmax, CeilDiv(n, blocksize) * 4);
  const auto kernel = BNB_OF_DTYPE(quantize_blockwise, dtype);
  return call.Run("quantize_blockwise", tiling.shares, tiling.tile, [=] { kernel(v, p, c, a, tiling); });
}

BNB_EXPORT int bnb_sim_gemv_4bit(const Options* options, Result* result, int dtype, int quant_type, int64_t batch,
                                 int64_t rows, int64_t columns, uint32_t blocksize, const void* a, const void* packed,
                                 const void* absmax, const void* codes, const void* map, const void* offset,
                                 void* out) {
  Call call(options, result);
  const int64_t size = dtype == BNB_FP32 ? 4 : 2, n = rows * columns, blocks = CeilDiv(n, blocksize);
  const bool nested = codes != nullptr;
  const auto tiling = TileGemv4bit(rows, columns, static_cast<uint32_t>(batch), blocksize, static_cast<uint32_t>(size),
                                   nested, quant_type == BNB_NF4 ? bnb::kNF4 : bnb::kFP4, call.platform());
  const auto x = call.In(a, batch * columns * size), p = call.In(packed, CeilDiv(n, 2)),
             s = call.In(absmax, (nested ? CeilDiv(blocks, kNestedBlock) : blocks) * 4), c = call.In(codes, blocks),
             m = call.In(map, kMapSize * 4), d = call.In(offset, 4), o = call.Out(out, batch * rows * size);
  const auto kernel = BNB_OF_DTYPE(gemv_4bit, dtype);
  return call.Run("gemv_4bit", tiling.shares, tiling.decode.tile, [=] { kernel(x, p, s, c, m, d, o, tiling); });
}
