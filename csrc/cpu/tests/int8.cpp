// LLM.int8() against an oracle that takes one element at a time.
#include "interval.h"

using namespace bnb_test;

namespace {

// Of a call that looks for no outliers.
constexpr float kNoThreshold = INFINITY;
constexpr int64_t kMaxOutliers = 70;

std::vector<float> Statistics(Random* random, int64_t count) {
  std::vector<float> stats;
  for (int64_t i = 0; i < count; ++i) stats.push_back(fabsf(random->Normal()) + 0.01f);
  return stats;
}
std::vector<int8_t> Codes(Random* random, int64_t count) {
  std::vector<int8_t> codes;
  // -128, which quantising does not give, is a factor as any other.
  constexpr int8_t kExtreme[] = {-128, -127, 127, 0};
  for (int64_t i = 0; i < count; ++i) {
    codes.push_back(random->Below(4) == 0 ? kExtreme[random->Below(4)] : static_cast<int8_t>(random->Bits()));
  }
  return codes;
}

// --- Rows ------------------------------------------------------------------------------------------------------------

struct Quantized {
  std::vector<int8_t> codes;
  std::vector<float> stats;
  std::vector<uint8_t> outliers;
};

Quantized Quantize(const Tensor& x, int64_t rows, int64_t columns, float threshold) {
  Quantized result;
  result.outliers.resize(columns);
  for (int64_t r = 0; r < rows; ++r) {
    float absmax = 0;
    for (int64_t c = 0; c < columns; ++c) {
      const float magnitude = fabsf(x.Get(r * columns + c));
      if (threshold != kNoThreshold && magnitude >= threshold) {
        result.outliers[c] = 1;
      } else if (!(magnitude <= absmax)) {
        absmax = isnan(absmax) ? absmax : magnitude;
      }
    }
    result.stats.push_back(absmax);
    const float factor = 127 / absmax;
    for (int64_t c = 0; c < columns; ++c) {
      const float value = x.Get(r * columns + c);
      float code = 0;
      if (isfinite(absmax) && absmax != 0) code = isinf(factor) ? value / absmax * 127 : value * factor;
      // Of the codes that are compared none is larger.
      result.codes.push_back(fabsf(code) < 128 ? static_cast<int8_t>(nearbyintf(code)) : int8_t{0});
    }
  }
  return result;
}

void CheckRows(const int8_t* codes, const float* stats, const uint8_t* outliers, const Quantized& expected) {
  const int64_t rows = static_cast<int64_t>(expected.stats.size());
  const int64_t columns = static_cast<int64_t>(expected.outliers.size());
  for (int64_t r = 0; r < rows; ++r) CHECK(Same(stats[r], expected.stats[r]));
  for (int64_t c = 0; c < columns; ++c) {
    if (outliers != nullptr) CHECK(outliers[c] == expected.outliers[c]);
    if (expected.outliers[c] != 0) continue;
    for (int64_t r = 0; r < rows; ++r) CHECK(codes[r * columns + c] == expected.codes[r * columns + c]);
  }
}

void TestQuantize() {
  constexpr int64_t kRows = 3;
  Guarded<uint8_t> in(4 * kRows * kLongest), outliers(kLongest);
  Guarded<int8_t> codes(kRows * kLongest);
  Guarded<float> stats(kRows);
  Random random(1);
  for (const int64_t columns : Lengths()) {
    for (const int dtype : kDtypes) {
      const int64_t rows = columns > 300 ? 2 : kRows;
      Tensor x(dtype, rows * columns);
      Fill(&random, &x);
      for (const float threshold : {kNoThreshold, 2.0f, 0x1p-130f}) {
        const Quantized expected = Quantize(x, rows, columns, threshold);
        Describe("int8 rows of %s, %d columns, threshold %g", kFormats[dtype].name, static_cast<int>(columns),
                 static_cast<double>(threshold));
        for (const At at : kSides) {
          const uint8_t* values = in.Input(x.bytes.data(), static_cast<int64_t>(x.bytes.size()), at);
          ForTargets([&] {
            int8_t* codes_out = codes.Output(rows * columns, at);
            float* stats_out = stats.Output(rows, at);
            uint8_t* columns_out = nullptr;
            if (threshold != kNoThreshold) {
              columns_out = outliers.Output(columns, at);
              for (int64_t c = 0; c < columns; ++c) columns_out[c] = 0;
            }
            RUN(bnb_cpu_int8_vectorwise_quant(dtype, rows, columns, values, threshold, codes_out, stats_out,
                                              columns_out, 1));
            codes.CheckWritten();
            stats.CheckWritten();
            if (columns_out != nullptr) outliers.CheckWritten();
            CheckRows(codes_out, stats_out, columns_out, expected);
          });
        }
      }
    }
  }
}

// Half-way values go to the even code, and the largest value of a row to 127.
void TestTies() {
  Tensor x(BNB_FP32, 0);
  std::vector<int> expected;
  const auto add = [&](float value, int code) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(&value);
    x.bytes.insert(x.bytes.end(), bytes, bytes + sizeof(value));
    expected.push_back(code);
  };
  add(127, 127);
  for (int i = -127; i < 127; ++i) {
    const int even = i % 2 == 0 ? i : i + 1;
    const float tie = static_cast<float>(i) + 0.5f;
    add(tie, even);
    add(nextafterf(tie, -INFINITY), i);
    add(nextafterf(tie, INFINITY), i + 1);
  }
  const int64_t n = x.Count();
  std::vector<int8_t> codes(n);
  ForTargets([&] {
    Describe("int8 ties");
    float stat;
    RUN(bnb_cpu_int8_vectorwise_quant(BNB_FP32, 1, n, x.bytes.data(), 0, codes.data(), &stat, nullptr, 1));
    CHECK(stat == 127);
    for (int64_t i = 0; i < n; ++i) CHECK(codes[i] == expected[i]);
  });
}

void TestDequantize() {
  constexpr int64_t kRows = 4;
  const int64_t kIndices[] = {3, 0, 0, 2, 3, 1};
  Guarded<int8_t> codes_in(kRows * kLongest);
  Guarded<float> stats_in(kRows);
  Guarded<int64_t> indices_in(6);
  Guarded<uint8_t> out(4 * 6 * kLongest);
  Random random(2);
  for (const int64_t columns : Lengths()) {
    const std::vector<int8_t> codes = Codes(&random, kRows * columns);
    std::vector<float> stats = Statistics(&random, kRows);
    stats[random.Below(kRows)] = kSpecial[random.Below(kSpecials)];
    for (const int dtype : kDtypes) {
      for (const int64_t count : {0, 1, 3, 6}) {
        for (const bool indexed : {false, true}) {
          if (!indexed && count > kRows) continue;
          Tensor expected(dtype, count * columns);
          for (int64_t i = 0; i < count * columns; ++i) {
            const int64_t row = indexed ? kIndices[i / columns] : i / columns;
            expected.Set(i, static_cast<float>(codes[row * columns + i % columns]) * stats[row] * (1 / 127.0f));
          }
          Describe("int8 rows to %s, %d columns, %d rows%s", kFormats[dtype].name, static_cast<int>(columns),
                   static_cast<int>(count), indexed ? " looked up" : "");
          for (const At at : kSides) {
            const int8_t* a = codes_in.Input(codes.data(), kRows * columns, at);
            const float* scales = stats_in.Input(stats.data(), kRows, at);
            const int64_t* indices = indexed ? indices_in.Input(kIndices, count, at) : nullptr;
            ForTargets([&] {
              uint8_t* values = out.Output(static_cast<int64_t>(expected.bytes.size()), at);
              RUN(bnb_cpu_int8_vectorwise_dequant(dtype, kRows, columns, a, scales, indices, count, values, 1));
              out.CheckWritten();
              CheckSame(values, expected);
            });
          }
        }
      }
    }
  }
}

// --- Products --------------------------------------------------------------------------------------------------------

struct Product {
  Product(Random* random, int64_t m, int64_t n, int64_t k)
      : m(m),
        n(n),
        k(k),
        a(Codes(random, m * k)),
        b(Codes(random, n * k)),
        row_stats(Statistics(random, m)),
        col_stats(Statistics(random, n)) {
    for (int64_t i = 0; i < n; ++i) bias.push_back(random->Normal() * 10);
    if (m > 0 && random->Below(4) == 0) row_stats[random->Below(m)] = kSpecial[random->Below(kSpecials)];
    if (n > 0 && random->Below(4) == 0) col_stats[random->Below(n)] = kSpecial[random->Below(kSpecials)];
    for (int64_t i = 0; i < m * n; ++i) {
      uint32_t sum = 0;  // modulo 2^32
      for (int64_t j = 0; j < k; ++j) {
        sum += static_cast<uint32_t>(int32_t{a[i / n * k + j]} * b[i % n * k + j]);
      }
      sums.push_back(static_cast<int32_t>(sum));
    }
    const int64_t outliers = k == 0 ? 0 : random->Below(2) == 0 ? 1 + random->Below(kMaxOutliers) : 1;
    for (int64_t i = 0; i < outliers; ++i) outlier_cols.push_back(random->Below(k));
    for (int64_t i = 0; i < m * outliers; ++i) outlier_values.push_back(random->Normal() * 20);
    // Visible in its row and in no other.
    if (m * outliers > 0 && random->Below(4) == 0) outlier_values[random->Below(m * outliers)] = NAN;
  }

  // One operation at a time, in the order of the reference.
  float Scaled(int64_t i) const {
    return row_stats[i / n] * col_stats[i % n] * static_cast<float>(sums[i]) * (1 / (127.0f * 127.0f));
  }
  Tensor Dequantized(int dtype, bool biased) const {
    Tensor out(dtype, m * n);
    for (int64_t i = 0; i < m * n; ++i) out.Set(i, biased ? Scaled(i) + bias[i % n] : Scaled(i));
    return out;
  }
  // With outliers: fp32 sums in any order.
  std::vector<Interval> Mixed(int dtype, bool biased) const {
    constexpr double kEps = 0x1p-23;
    const int64_t outliers = static_cast<int64_t>(outlier_cols.size());
    std::vector<Interval> out;
    for (int64_t i = 0; i < m * n; ++i) {
      const double scaled = static_cast<double>(Scaled(i));
      double sum = 0, size = 0;
      for (int64_t j = 0; j < outliers; ++j) {
        const float weight = static_cast<float>(b[i % n * k + outlier_cols[j]]) * col_stats[i % n] * (1 / 127.0f);
        const double product = static_cast<double>(outlier_values[i / n * outliers + j]) * static_cast<double>(weight);
        sum += product;
        size += fabs(product);
      }
      const double offset = biased ? static_cast<double>(bias[i % n]) : 0;
      // Near zero a rounding is an error of up to one subnormal step.
      const double error = kEps * (2 * static_cast<double>(outliers) * size + fabs(scaled) + fabs(sum) + fabs(offset)) +
                           static_cast<double>(outliers + 2) * 0x1p-149;
      out.push_back(Around(scaled + sum + offset, error, kFormats[dtype]));
    }
    return out;
  }

  int64_t m, n, k;
  std::vector<int8_t> a, b;
  std::vector<float> row_stats, col_stats, bias, outlier_values;
  std::vector<int64_t> outlier_cols;
  std::vector<int32_t> sums;
};

class ProductTest {
 public:
  ProductTest(int64_t m, int64_t n, int64_t k)
      : a_(m * k),
        b_(n * k),
        row_stats_(m),
        col_stats_(n),
        bias_(n),
        outlier_values_(m * kMaxOutliers),
        outlier_cols_(kMaxOutliers),
        sums_in_(m * n),
        sums_(m * n),
        out_(4 * m * n) {}

  void Run(const Product& p) {
    for (const At at : kSides) {
      const int8_t *a = Put(&a_, p.a, at), *b = Put(&b_, p.b, at);
      const float *row_stats = Put(&row_stats_, p.row_stats, at), *col_stats = Put(&col_stats_, p.col_stats, at);
      const float *bias = Put(&bias_, p.bias, at), *values = Put(&outlier_values_, p.outlier_values, at);
      const int64_t* columns = Put(&outlier_cols_, p.outlier_cols, at);
      const int32_t* sums = Put(&sums_in_, p.sums, at);
      const int64_t count = p.m * p.n, outliers = static_cast<int64_t>(p.outlier_cols.size());
      Describe("int8 product, %d x %d x %d", static_cast<int>(p.m), static_cast<int>(p.n), static_cast<int>(p.k));
      ForTargets([&] {
        int32_t* product = sums_.Output(count, at);
        RUN(bnb_cpu_int8_linear_matmul(p.m, p.n, p.k, a, b, product, 1));
        sums_.CheckWritten();
        for (int64_t i = 0; i < count; ++i) CHECK(product[i] == p.sums[i]);
      });
      for (const int dtype : kDtypes) {
        for (const bool biased : {false, true}) {
          const Tensor expected = p.Dequantized(dtype, biased);
          const std::vector<Interval> mixed = p.Mixed(dtype, biased);
          const int64_t bytes = static_cast<int64_t>(expected.bytes.size());
          const float* added = biased ? bias : nullptr;
          Describe("int8 product to %s%s, %d x %d x %d, %d outliers", kFormats[dtype].name, biased ? " with bias" : "",
                   static_cast<int>(p.m), static_cast<int>(p.n), static_cast<int>(p.k), static_cast<int>(outliers));
          ForTargets([&] {
            uint8_t* out = out_.Output(bytes, at);
            RUN(bnb_cpu_int8_mm_dequant(dtype, p.m, p.n, sums, row_stats, col_stats, added, out, 1));
            out_.CheckWritten();
            CheckSame(out, expected);

            out = out_.Output(bytes, at);
            RUN(bnb_cpu_int8_scaled_mm(dtype, p.m, p.n, p.k, a, b, row_stats, col_stats, added, 0, nullptr, nullptr,
                                       out, 1));
            out_.CheckWritten();
            CheckSame(out, expected);

            out = out_.Output(bytes, at);
            RUN(bnb_cpu_int8_scaled_mm(dtype, p.m, p.n, p.k, a, b, row_stats, col_stats, added, outliers, columns,
                                       values, out, 1));
            out_.CheckWritten();
            CheckWithin(out, count, mixed.data(), kFormats[dtype]);
          });
        }
      }
    }
  }

 private:
  template <typename T>
  static const T* Put(Guarded<T>* memory, const std::vector<T>& values, At at) {
    return memory->Input(values.data(), static_cast<int64_t>(values.size()), at);
  }

  Guarded<int8_t> a_, b_;
  Guarded<float> row_stats_, col_stats_, bias_, outlier_values_;
  Guarded<int64_t> outlier_cols_;
  Guarded<int32_t> sums_in_, sums_;
  Guarded<uint8_t> out_;
};

// Every depth, with rows that do not fill what is multiplied at a time.
void TestDepths() {
  ProductTest test(7, 5, kLongest);
  Random random(3);
  for (const int64_t k : Lengths()) test.Run(Product(&random, 1 + k % 7, 1 + k % 5, k));
}

// Rows of A and B around the sizes of tiles and blocks.
void TestSizes() {
  Random random(4);
  ProductTest test(14, 14, 70);
  for (int64_t m = 0; m <= 14; ++m) {
    for (int64_t n = 0; n <= 14; ++n) test.Run(Product(&random, m, n, 1 + random.Below(70)));
  }
  // Every tail of a vector of outputs, over two panels of B.
  ProductTest wide(2, 150, 9);
  for (int64_t n = 15; n <= 150; ++n) wide.Run(Product(&random, 1 + n % 2, n, 9));
  ProductTest tall(193, 129, 66);
  for (const int64_t m : {95, 96, 97, 193}) {
    for (const int64_t n : {63, 65, 129}) tall.Run(Product(&random, m, n, 66));
  }
}

// Sums of more than 2^31 wrap around.
void TestWrap() {
  constexpr int64_t kDepth = (1 << 17) + 5;
  Random random(5);
  Product p(&random, 1, 2, 1);
  p.k = kDepth;
  p.a.assign(kDepth, -128);
  p.b.assign(2 * kDepth, -128);
  for (int64_t i = 0; i < kDepth; ++i) p.b[kDepth + i] = 127;
  const int64_t sums[] = {kDepth * 128 * 128, kDepth * -128 * 127};
  ForTargets([&] {
    Describe("int8 sums that wrap around");
    int32_t out[2];
    RUN(bnb_cpu_int8_linear_matmul(1, 2, kDepth, p.a.data(), p.b.data(), out, 1));
    for (int i = 0; i < 2; ++i) CHECK(out[i] == static_cast<int32_t>(static_cast<uint32_t>(sums[i])));
  });
}

// --- Threads and arguments -------------------------------------------------------------------------------------------

template <typename T>
void Append(std::vector<uint8_t>* bytes, const std::vector<T>& values) {
  const auto* begin = reinterpret_cast<const uint8_t*>(values.data());
  bytes->insert(bytes->end(), begin, begin + values.size() * sizeof(T));
}

void TestThreads() {
  constexpr int64_t kRows = 331, kColumns = 301;
  Random random(6);
  Tensor x(BNB_FP16, kRows * kColumns);
  Fill(&random, &x);
  const std::vector<float> stats = Statistics(&random, kRows);
  CheckThreads([&](int threads) {
    std::vector<int8_t> codes(kRows * kColumns);
    std::vector<float> absmax(kRows);
    // With a threshold codes in the columns of outliers are undefined.
    std::vector<uint8_t> bytes, outliers(kColumns), decoded(kRows * kColumns * 2);
    RUN(bnb_cpu_int8_vectorwise_quant(BNB_FP16, kRows, kColumns, x.bytes.data(), 2, codes.data(), absmax.data(),
                                      outliers.data(), threads));
    Append(&bytes, absmax);
    Append(&bytes, outliers);
    RUN(bnb_cpu_int8_vectorwise_quant(BNB_FP16, kRows, kColumns, x.bytes.data(), 0, codes.data(), absmax.data(),
                                      nullptr, threads));
    Append(&bytes, absmax);
    Append(&bytes, codes);
    RUN(bnb_cpu_int8_vectorwise_dequant(BNB_FP16, kRows, kColumns, codes.data(), stats.data(), nullptr, kRows,
                                        decoded.data(), threads));
    Append(&bytes, decoded);
    return bytes;
  });

  constexpr int64_t kM = 101, kN = 130, kK = 203;
  const Product p(&random, kM, kN, kK);
  CheckThreads([&](int threads) {
    std::vector<int32_t> product(kM * kN);
    std::vector<uint8_t> bytes, out(kM * kN * 2);
    RUN(bnb_cpu_int8_linear_matmul(kM, kN, kK, p.a.data(), p.b.data(), product.data(), threads));
    Append(&bytes, product);
    RUN(bnb_cpu_int8_scaled_mm(BNB_BF16, kM, kN, kK, p.a.data(), p.b.data(), p.row_stats.data(), p.col_stats.data(),
                               p.bias.data(), static_cast<int64_t>(p.outlier_cols.size()), p.outlier_cols.data(),
                               p.outlier_values.data(), out.data(), threads));
    Append(&bytes, out);
    return bytes;
  });

  constexpr int64_t kProducts = 300;
  std::vector<int32_t> sums;
  for (int64_t i = 0; i < kProducts * kProducts; ++i) sums.push_back(static_cast<int32_t>(random.Bits()));
  const std::vector<float> scales = Statistics(&random, kProducts);
  CheckThreads([&](int threads) {
    std::vector<uint8_t> out(kProducts * kProducts * 4);
    RUN(bnb_cpu_int8_mm_dequant(BNB_FP32, kProducts, kProducts, sums.data(), scales.data(), scales.data(), nullptr,
                                out.data(), threads));
    return out;
  });
}

void TestArguments() {
  int8_t* const codes = Nowhere<int8_t>();
  float* const floats = Nowhere<float>();
  int32_t* const sums = Nowhere<int32_t>();
  uint8_t* const bytes = Nowhere<uint8_t>();
  int64_t* const indices = Nowhere<int64_t>();
  const auto refused = [&](int dtype, int64_t m, int64_t n, int64_t k) {
    REFUSED(bnb_cpu_int8_vectorwise_quant(dtype, m, n, Nowhere(), 1, codes, floats, bytes, 1));
    REFUSED(bnb_cpu_int8_vectorwise_dequant(dtype, m, n, codes, floats, indices, 3, Nowhere(), 1));
    REFUSED(bnb_cpu_int8_mm_dequant(dtype, m, n, sums, floats, floats, floats, Nowhere(), 1));
    REFUSED(
        bnb_cpu_int8_scaled_mm(dtype, m, n, k, codes, codes, floats, floats, floats, 2, indices, floats, Nowhere(), 1));
  };
  ForTargets([&] {
    for (const int dtype : {-1, 3, 1 << 30}) refused(dtype, 3, 3, 3);
    for (const int64_t size : {int64_t{-1}, INT64_MIN}) {
      refused(BNB_FP32, size, 3, 3);
      refused(BNB_FP32, 3, size, 3);
      REFUSED(bnb_cpu_int8_vectorwise_dequant(BNB_FP32, 3, 3, codes, floats, indices, size, Nowhere(), 1));
      REFUSED(bnb_cpu_int8_linear_matmul(size, 3, 3, codes, codes, sums, 1));
      REFUSED(bnb_cpu_int8_linear_matmul(3, size, 3, codes, codes, sums, 1));
      REFUSED(bnb_cpu_int8_linear_matmul(3, 3, size, codes, codes, sums, 1));
      REFUSED(bnb_cpu_int8_scaled_mm(BNB_FP32, 3, 3, size, codes, codes, floats, floats, floats, 2, indices, floats,
                                     Nowhere(), 1));
      REFUSED(bnb_cpu_int8_scaled_mm(BNB_FP32, 3, 3, 3, codes, codes, floats, floats, floats, size, indices, floats,
                                     Nowhere(), 1));
    }
    // More rows than there are.
    REFUSED(bnb_cpu_int8_vectorwise_dequant(BNB_FP32, 3, 3, codes, floats, nullptr, 4, Nowhere(), 1));
    CHECK(strcmp(bnb_cpu_last_target(), "") == 0);  // no kernel ran

    for (const int64_t wrong : {int64_t{-1}, int64_t{3}, INT64_MIN, INT64_MAX}) {
      const int64_t rows[] = {0, 2, wrong};
      CHECK(bnb_cpu_int8_vectorwise_dequant(BNB_FP32, 3, 3, codes, floats, rows, 3, Nowhere(), 1) ==
            BNB_INDEX_OUT_OF_RANGE);
    }
    RUN(bnb_cpu_int8_vectorwise_quant(BNB_FP32, 0, 3, nullptr, 1, nullptr, nullptr, bytes, 1));
    RUN(bnb_cpu_int8_vectorwise_dequant(BNB_FP32, 3, 0, nullptr, floats, nullptr, 0, nullptr, 1));
    RUN(bnb_cpu_int8_linear_matmul(0, 3, 3, nullptr, codes, nullptr, 1));
    RUN(bnb_cpu_int8_mm_dequant(BNB_FP32, 0, 3, nullptr, nullptr, floats, floats, nullptr, 1));
    RUN(bnb_cpu_int8_scaled_mm(BNB_FP32, 3, 0, 3, codes, nullptr, floats, nullptr, nullptr, 0, nullptr, nullptr,
                               nullptr, 1));
  });
}

}  // namespace

int main(int argc, char** argv) {
  return RunTests(argc, argv,
                  {{"arguments", TestArguments},
                   {"quantize", TestQuantize},
                   {"ties", TestTies},
                   {"dequantize", TestDequantize},
                   {"depths", TestDepths},
                   {"sizes", TestSizes},
                   {"wrap", TestWrap},
                   {"threads", TestThreads}});
}
