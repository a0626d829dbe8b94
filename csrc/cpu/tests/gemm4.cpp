// Products with 4-bit weights within the bounds of docs/numerics.md, and rows of tables exactly.
#include <algorithm>

#include "fourbit_oracle.h"
#include "interval.h"

using namespace bnb_test;

namespace {

constexpr int64_t kNested = 256;

// A 4-bit weight with random codes and scales, in guarded memory, with each way to give levels and scales.
struct Weight {
  Weight(Random* random, int quant_type, int64_t blocksize, int64_t rows, int64_t columns, bool nested, bool levels)
      : quant_type(quant_type), blocksize(blocksize), rows(rows), columns(columns) {
    const int64_t count = rows * columns, blocks = (count + blocksize - 1) / blocksize;
    for (int64_t i = 0; i < (count + 1) / 2; ++i) packed.push_back(static_cast<uint8_t>(random->Bits()));
    for (int code = 0; code < 16; ++code) {
      level[code] = levels ? random->Normal() : Level(quant_type, code);
      if (levels) code_levels.push_back(level[code]);
    }
    if (nested) {
      offset = random->Normal();
      for (int i = 0; i < 256; ++i) map.push_back(random->Normal());
      for (int64_t i = 0; i < blocks; ++i) codes.push_back(static_cast<uint8_t>(random->Bits()));
      for (int64_t i = 0; i < (blocks + kNested - 1) / kNested; ++i) absmax.push_back(random->Normal());
      for (int64_t i = 0; i < blocks; ++i) scales.push_back(map[codes[i]] * absmax[i / kNested] + offset);
    } else {
      for (int64_t i = 0; i < blocks; ++i) absmax.push_back(random->Below(64) == 0 ? NAN : random->Normal());
      scales = absmax;
    }
  }
  float Value(int64_t row, int64_t column) const {
    const int64_t i = row * columns + column;
    return level[CodeAt(packed, i)] * scales[i / blocksize];
  }

  int quant_type;
  int64_t blocksize, rows, columns;
  float level[16], offset = 0;
  std::vector<float> code_levels, map, absmax, scales;
  std::vector<uint8_t> packed, codes;
};

// A weight's arrays between guard pages. What is not given is null.
class GuardedWeight {
 public:
  GuardedWeight(const Weight& w, At at)
      : levels_(16),
        absmax_(Size(w.absmax)),
        map_(256),
        packed_(Size(w.packed)),
        codes_(Size(w.codes)),
        levels(Input(&levels_, w.code_levels, at)),
        absmax(absmax_.Input(w.absmax.data(), Size(w.absmax), at)),
        map(Input(&map_, w.map, at)),
        packed(packed_.Input(w.packed.data(), Size(w.packed), at)),
        codes(Input(&codes_, w.codes, at)) {}

 private:
  template <typename T>
  static int64_t Size(const std::vector<T>& values) {
    return static_cast<int64_t>(values.size());
  }
  template <typename T>
  static const T* Input(Guarded<T>* memory, const std::vector<T>& values, At at) {
    return values.empty() ? nullptr : memory->Input(values.data(), Size(values), at);
  }
  Guarded<float> levels_, absmax_, map_;
  Guarded<uint8_t> packed_, codes_;

 public:
  const float *levels, *absmax, *map;
  const uint8_t *packed, *codes;
};

// What a product may be: within the first bound, and within the second one, that of weights rounded to bf16.
struct Bounds {
  std::vector<Interval> exact, rounded;
};

Bounds Products(const Weight& w, const Tensor& x, const Tensor* bias, int64_t m) {
  Bounds bounds;
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t row = 0; row < w.rows; ++row) {
      double sum = bias == nullptr ? 0 : bias->Get(row), magnitude = 0;
      for (int64_t k = 0; k < w.columns; ++k) {
        const double product = static_cast<double>(x.Get(i * w.columns + k)) * w.Value(row, k);
        sum += product;
        magnitude += fabs(product);
      }
      // The last term: the bias is added in fp32.
      const double error = 0x1p-23 * (static_cast<double>(2 * w.columns) * magnitude + fabs(sum));
      bounds.exact.push_back(Around(sum, error, x.format()));
      bounds.rounded.push_back(Around(sum, error + 0x1p-8 * magnitude, x.format()));
    }
  }
  return bounds;
}

// Runs products of the first rows of x, once for each number of rows, and checks them.
void CheckProducts(const Weight& w, const Tensor& x, const Tensor* bias, const std::vector<int64_t>& rows) {
  const int64_t n = w.rows, k = w.columns, most = x.Count() / (k == 0 ? 1 : k), size = x.Bytes();
  const int64_t largest = *std::max_element(rows.begin(), rows.end());
  CHECK(k == 0 || largest <= most);
  const Bounds bounds = Products(w, x, bias, largest);
  Guarded<uint8_t> in(largest * k * size), bias_in(n * size), out(largest * n * size);
  for (const At at : kSides) {
    const GuardedWeight g(w, at);
    const uint8_t* b = bias != nullptr ? bias_in.Input(bias->bytes.data(), n * size, at) : nullptr;
    for (const int64_t m : rows) {
      Describe("gemm %s, m %d, n %d, k %d, type %d, blocksize %d%s%s%s", x.format().name, static_cast<int>(m),
               static_cast<int>(n), static_cast<int>(k), w.quant_type, static_cast<int>(w.blocksize),
               w.codes.empty() ? "" : ", nested", w.code_levels.empty() ? "" : ", own levels",
               bias != nullptr ? ", bias" : "");
      const uint8_t* a = in.Input(x.bytes.data(), m * k * size, at);
      ForTargets([&] {
        uint8_t* result = out.Output(m * n * size, at);
        RUN(bnb_cpu_gemm_4bit(x.dtype, w.quant_type, g.levels, w.blocksize, m, n, k, a, g.packed, g.absmax, g.codes,
                              g.map, w.offset, b, result, 1));
        out.CheckWritten();
        const bool rounds = x.dtype == BNB_BF16 && m > 2 && strcmp(bnb_cpu_target(), "avx512_bf16") == 0;
        CheckWithin(result, m * n, (rounds ? bounds.rounded : bounds.exact).data(), x.format());
      });
    }
  }
}

Tensor Normal(Random* random, int dtype, int64_t count) {
  Tensor x(dtype, count);
  for (int64_t i = 0; i < count; ++i) x.Set(i, random->Normal());
  return x;
}

// No row, and every number of rows of a tile, for every tail of a row of the weight.
void TestGemm() {
  std::vector<int64_t> rows, inner;
  for (int64_t m = 0; m <= 14; ++m) rows.push_back(m);
  for (int64_t k = 0; k <= 300; ++k) inner.push_back(k);
  for (const int64_t k : {576, 1000, 4104}) inner.push_back(k);
  Random random(3);
  int turn = 0;
  for (const int64_t k : inner) {
    for (const int dtype : kDtypes) {
      const int64_t n = 1 + random.Below(9), blocksize = kBlocksizes[random.Below(8)];
      const bool nested = ++turn % 2 == 0, levels = turn % 3 == 0, has_bias = turn % 5 < 3;
      const Weight w(&random, turn % 4 < 2 ? BNB_NF4 : BNB_FP4, blocksize, n, k, nested, levels);
      const Tensor x = Normal(&random, dtype, rows.back() * k), bias = Normal(&random, dtype, n);
      CheckProducts(w, x, has_bias ? &bias : nullptr, rows);
    }
  }
}

// Every block size, for rows that begin on blocks and rows that do not.
void TestBlocksizes() {
  Random random(6);
  for (const int64_t k : {8, 32, 40, 64, 77, 96, 160, 256, 328, 576, 1000, 4104}) {
    for (const int64_t blocksize : kBlocksizes) {
      for (const bool nested : {false, true}) {
        for (const int quant_type : kQuantTypes) {
          const Weight w(&random, quant_type, blocksize, 5, k, nested, false);
          for (const int dtype : kDtypes) CheckProducts(w, Normal(&random, dtype, 3 * k), nullptr, {1, 2, 3});
        }
      }
    }
  }
}

// More rows of inputs than two tiles have, and every tail of the rows of the weight, whose sums are written 64 at once.
void TestSizes() {
  std::vector<int64_t> sizes;
  for (int64_t n = 1; n <= 17; ++n) sizes.push_back(n);
  for (const int64_t n : {63, 64, 65, 79, 130}) sizes.push_back(n);
  Random random(7);
  for (const int64_t k : {40, 77}) {
    for (const int64_t n : sizes) {
      for (const int dtype : kDtypes) {
        const Weight w(&random, BNB_NF4, 32, n, k, false, false);
        const Tensor x = Normal(&random, dtype, 64 * k), bias = Normal(&random, dtype, n);
        CheckProducts(w, x, &bias, {15, 16, 17, 18, 19, 23, 31, 64});
      }
    }
  }
}

// A scale or an input that is not finite stays within its row: all rows but one have only such values, except in blocks
// that they share with it.
void TestNotFinite() {
  constexpr float kNotFinite[] = {INFINITY, -INFINITY, NAN};
  constexpr int64_t kRows = 7, kInputs = 7;
  Random random(8);
  for (int64_t k = 1; k <= 300; ++k) {
    for (const int dtype : kDtypes) {
      const int64_t blocksize = random.Below(2) == 0 ? 32 : 64, row = random.Below(kRows),
                    input = random.Below(kInputs);
      Weight w(&random, BNB_NF4, blocksize, kRows, k, false, false);
      for (int64_t block = 0; block < static_cast<int64_t>(w.absmax.size()); ++block) {
        const bool shared = block >= row * k / blocksize && block <= ((row + 1) * k - 1) / blocksize;
        w.absmax[block] = shared ? random.Normal() : kNotFinite[random.Below(3)];
      }
      w.scales = w.absmax;
      Tensor x = Normal(&random, dtype, kInputs * k);
      CheckProducts(w, x, nullptr, {1, 2, 3, kInputs});
      for (int64_t i = 0; i < kInputs * k; ++i) {
        if (i / k != input) x.Set(i, kNotFinite[random.Below(3)]);
      }
      CheckProducts(w, x, nullptr, {2, kInputs});
    }
  }
}

void TestRows() {
  Random random(4);
  int turn = 0;
  std::vector<int64_t> widths;
  for (int64_t width = 0; width <= 300; ++width) widths.push_back(width);
  for (const int64_t width : {576, 1000, 4104}) widths.push_back(width);
  for (const int64_t width : widths) {
    for (const int dtype : kDtypes) {
      const int64_t rows = 1 + random.Below(6), blocksize = kBlocksizes[random.Below(8)], count = random.Below(5);
      const bool nested = ++turn % 2 == 0, levels = turn % 3 == 0, chosen = turn % 5 < 3;
      const Weight w(&random, turn % 4 < 2 ? BNB_NF4 : BNB_FP4, blocksize, rows, width, nested, levels);
      std::vector<int64_t> indices(static_cast<size_t>(chosen ? count : 0));
      for (int64_t& index : indices) index = random.Below(rows);
      const int64_t first = random.Below(rows), taken = chosen || count <= rows - first ? count : rows - first;
      Tensor expected(dtype, taken * width);
      for (int64_t i = 0; i < taken; ++i) {
        const int64_t row = chosen ? indices[i] : first + i;
        for (int64_t k = 0; k < width; ++k) expected.Set(i * width + k, w.Value(row, k));
      }
      Describe("rows %s of %d x %d, blocksize %d%s%s%s", expected.format().name, static_cast<int>(rows),
               static_cast<int>(width), static_cast<int>(blocksize), nested ? ", nested" : "",
               levels ? ", own levels" : "", chosen ? ", by index" : "");
      Guarded<uint8_t> out(taken * width * 4);
      Guarded<int64_t> index_in(taken);
      for (const At at : kSides) {
        const GuardedWeight g(w, at);
        const int64_t* index = chosen ? index_in.Input(indices.data(), taken, at) : nullptr;
        ForTargets([&] {
          uint8_t* result = out.Output(taken * width * expected.Bytes(), at);
          RUN(bnb_cpu_decode_rows_4bit(dtype, w.quant_type, g.levels, blocksize, rows, width, g.packed, g.absmax,
                                       g.codes, g.map, w.offset, index, first, taken, result, 1));
          out.CheckWritten();
          CheckSame(result, expected);
        });
      }
    }
  }
}

void TestThreads() {
  constexpr int64_t kM = 20, kN = 600;
  Random random(5);
  for (const int64_t k : {520, 521}) {
    const bool nested = k % 8 != 0;
    const Weight w(&random, BNB_NF4, 64, kN, k, nested, false);
    const Tensor x = Normal(&random, BNB_BF16, kM * k);
    const GuardedWeight g(w, At::kEnd);
    for (const int64_t m : {int64_t{1}, int64_t{3}, kM}) {
      CheckThreads([&](int threads) {
        std::vector<uint8_t> out(static_cast<size_t>(m * kN * 2));
        RUN(bnb_cpu_gemm_4bit(BNB_BF16, BNB_NF4, nullptr, 64, m, kN, k, x.bytes.data(), g.packed, g.absmax, g.codes,
                              g.map, w.offset, nullptr, out.data(), threads));
        return out;
      });
    }
    CheckThreads([&](int threads) {
      std::vector<uint8_t> out(static_cast<size_t>(kN * k * 4));
      RUN(bnb_cpu_decode_rows_4bit(BNB_FP32, BNB_NF4, nullptr, 64, kN, k, g.packed, g.absmax, g.codes, g.map, w.offset,
                                   nullptr, 0, kN, out.data(), threads));
      return out;
    });
  }
}

int Gemm(int dtype, int quant_type, int64_t blocksize, int64_t m, int64_t n, int64_t k) {
  return bnb_cpu_gemm_4bit(dtype, quant_type, Nowhere<float>(), blocksize, m, n, k, Nowhere(), Nowhere<uint8_t>(),
                           Nowhere<float>(), Nowhere<uint8_t>(), Nowhere<float>(), 0, Nowhere(), Nowhere(), 1);
}
int Rows(int dtype, int quant_type, int64_t blocksize, int64_t rows, int64_t width, int64_t first, int64_t count) {
  return bnb_cpu_decode_rows_4bit(dtype, quant_type, Nowhere<float>(), blocksize, rows, width, Nowhere<uint8_t>(),
                                  Nowhere<float>(), Nowhere<uint8_t>(), Nowhere<float>(), 0, nullptr, first, count,
                                  Nowhere(), 1);
}

void TestArguments() {
  ForTargets([] {
    for (const int wrong : {-1, 3, 1 << 30}) {
      REFUSED(Gemm(wrong, BNB_NF4, 64, 2, 2, 2));
      REFUSED(Gemm(BNB_FP32, wrong, 64, 2, 2, 2));
      REFUSED(Gemm(BNB_FP32, BNB_NF4, wrong, 2, 2, 2));
      REFUSED(Rows(wrong, BNB_NF4, 64, 2, 2, 0, 2));
      REFUSED(Rows(BNB_FP32, wrong, 64, 2, 2, 0, 2));
      REFUSED(Rows(BNB_FP32, BNB_NF4, wrong, 2, 2, 0, 2));
    }
    for (const int64_t wrong : {int64_t{-1}, INT64_MIN}) {
      REFUSED(Gemm(BNB_FP32, BNB_NF4, 64, wrong, 2, 2));
      REFUSED(Gemm(BNB_FP32, BNB_NF4, 64, 2, wrong, 2));
      REFUSED(Gemm(BNB_FP32, BNB_NF4, 64, 2, 2, wrong));
      REFUSED(Rows(BNB_FP32, BNB_NF4, 64, wrong, 2, 0, 0));
      REFUSED(Rows(BNB_FP32, BNB_NF4, 64, 2, wrong, 0, 2));
      REFUSED(Rows(BNB_FP32, BNB_NF4, 64, 2, 2, wrong, 2));
      REFUSED(Rows(BNB_FP32, BNB_NF4, 64, 2, 2, 0, wrong));
    }
    REFUSED(Rows(BNB_FP32, BNB_NF4, 64, 2, 2, 1, 2));  // past the table
    REFUSED(Rows(BNB_FP32, BNB_NF4, 64, 2, 2, INT64_MAX, INT64_MAX));
    CHECK(strcmp(bnb_cpu_last_target(), "") == 0);  // no kernel ran

    for (const int64_t wrong : {int64_t{-1}, int64_t{2}, INT64_MIN, INT64_MAX}) {
      const int64_t indices[] = {0, wrong};
      CHECK(bnb_cpu_decode_rows_4bit(BNB_FP32, BNB_NF4, nullptr, 64, 2, 2, Nowhere<uint8_t>(), Nowhere<float>(),
                                     nullptr, nullptr, 0, indices, 0, 2, Nowhere(), 1) == BNB_INDEX_OUT_OF_RANGE);
    }
    // No inputs, and no rows.
    RUN(bnb_cpu_gemm_4bit(BNB_FP32, BNB_NF4, nullptr, 64, 0, 3, 0, nullptr, nullptr, nullptr, nullptr, nullptr, 0,
                          nullptr, nullptr, 1));
    RUN(bnb_cpu_gemm_4bit(BNB_FP32, BNB_NF4, nullptr, 64, 3, 0, 0, nullptr, nullptr, nullptr, nullptr, nullptr, 0,
                          nullptr, nullptr, 1));
    RUN(bnb_cpu_decode_rows_4bit(BNB_FP32, BNB_NF4, nullptr, 64, 0, 3, nullptr, nullptr, nullptr, nullptr, 0, nullptr,
                                 0, 0, nullptr, 1));
  });
}

}  // namespace

int main(int argc, char** argv) {
  return RunTests(argc, argv,
                  {{"arguments", TestArguments},
                   {"gemm", TestGemm},
                   {"blocksizes", TestBlocksizes},
                   {"sizes", TestSizes},
                   {"not-finite", TestNotFinite},
                   {"rows", TestRows},
                   {"threads", TestThreads}});
}
