// LLM.int8(): rows and products against oracles that take one element at a time.
#include "harness.h"

using namespace bnb_test;

namespace {

int8_t AnyCode(Random* random) { return static_cast<int8_t>(random->Bits()); }  // -128 as well

template <typename T>
std::vector<T> Vector(int64_t count) {
  return std::vector<T>(static_cast<size_t>(count));
}

float Decoded(int8_t code, float stat) { return static_cast<float>(code) * stat * (1.0f / 127); }

// --- Rows ------------------------------------------------------------------------------------------------------------

struct Quantized {
  std::vector<int8_t> codes;
  std::vector<float> stats;
  std::vector<uint8_t> outliers;
};

Quantized QuantizeRows(const Tensor& x, int64_t rows, int64_t columns, bool find, float threshold) {
  Quantized result{Vector<int8_t>(rows * columns), Vector<float>(rows), Vector<uint8_t>(columns)};
  for (int64_t row = 0; row < rows; ++row) {
    float absmax = 0;
    for (int64_t i = 0; i < columns; ++i) {
      const float magnitude = fabsf(x.Get(row * columns + i));
      if (find && magnitude >= threshold) {
        result.outliers[i] = 1;
      } else if (!(magnitude <= absmax)) {
        absmax = isnan(absmax) ? absmax : magnitude;
      }
    }
    result.stats[row] = absmax;
    for (int64_t i = 0; i < columns && isfinite(absmax) && absmax != 0; ++i) {
      const float value = x.Get(row * columns + i), factor = 127 / absmax;
      const float scaled = rintf(isinf(factor) ? value / absmax * 127 : value * factor);
      result.codes[row * columns + i] = static_cast<int8_t>(scaled > 127 ? 127 : scaled < -127 ? -127 : scaled);
    }
  }
  return result;
}

void TestQuantize() {
  constexpr int64_t kRows = 3;
  Random random(9);
  Guarded<uint8_t> in(4 * kRows * kLongest), outliers(kLongest);
  Guarded<int8_t> codes(kRows * kLongest);
  Guarded<float> stats(kRows);
  for (const int64_t columns : Lengths()) {
    for (const int dtype : kDtypes) {
      Tensor x(dtype, kRows * columns);
      for (const bool find : {false, true}) {
        constexpr float kThreshold = 1.5f;
        Fill(&random, &x);
        const Quantized expected = QuantizeRows(x, kRows, columns, find, kThreshold);
        Describe("int8 rows, %s, %d columns%s", x.format().name, static_cast<int>(columns), find ? ", outliers" : "");
        for (const At at : kSides) {
          const uint8_t* values = in.Input(x.bytes.data(), kRows * columns * x.Bytes(), at);
          ForTargets([&] {
            int8_t* codes_out = codes.Output(kRows * columns, at);
            float* stats_out = stats.Output(kRows, at);
            uint8_t* outliers_out = outliers.Output(columns, at);
            memset(outliers_out, 0, static_cast<size_t>(columns));
            RUN(bnb_cpu_int8_vectorwise_quant(dtype, kRows, columns, values, kThreshold, codes_out, stats_out,
                                              find ? outliers_out : nullptr, 1));
            codes.CheckWritten();
            stats.CheckWritten();
            outliers.CheckWritten();
            for (int64_t row = 0; row < kRows; ++row) CHECK(Same(stats_out[row], expected.stats[row]));
            for (int64_t i = 0; find && i < columns; ++i) CHECK(outliers_out[i] == expected.outliers[i]);
            for (int64_t i = 0; i < kRows * columns; ++i) {
              CHECK(expected.outliers[i % columns] != 0 || codes_out[i] == expected.codes[i]);
            }
          });
        }
      }
    }
  }
}

// Halves round to the even code.
void TestTies() {
  Tensor x(BNB_FP32, 257);
  x.Set(0, 127);  // the scale is 1
  for (int i = 1; i < 257; ++i) x.Set(i, static_cast<float>(i) / 2 - 64.5f);
  const Quantized expected = QuantizeRows(x, 1, 257, false, 0);
  CHECK(expected.codes[2] == -64 && expected.codes[4] == -62 && expected.codes[256] == 64);
  ForTargets([&] {
    std::vector<int8_t> codes(257);
    float stat;
    RUN(bnb_cpu_int8_vectorwise_quant(BNB_FP32, 1, 257, x.bytes.data(), 0, codes.data(), &stat, nullptr, 1));
    CHECK(codes == expected.codes && stat == 127);
  });
}

void TestDequantize() {
  Random random(10);
  Guarded<int8_t> codes_in(5 * kLongest);
  Guarded<float> stats_in(5);
  Guarded<int64_t> indices_in(8);
  Guarded<uint8_t> out(8 * 4 * kLongest);
  for (const int64_t columns : Lengths()) {
    for (const int dtype : kDtypes) {
      const int64_t rows = 1 + random.Below(5);
      const bool chosen = random.Below(2) != 0;
      auto codes = Vector<int8_t>(rows * columns);
      auto stats = Vector<float>(rows);
      auto indices = Vector<int64_t>(chosen ? random.Below(8) : random.Below(rows + 1));
      for (int8_t& code : codes) code = AnyCode(&random);
      for (float& stat : stats) stat = random.Below(8) == 0 ? kSpecial[random.Below(kSpecials)] : random.Normal();
      const auto count = static_cast<int64_t>(indices.size());
      for (int64_t i = 0; i < count; ++i) indices[i] = chosen ? random.Below(rows) : i;
      Tensor expected(dtype, count * columns);
      for (int64_t i = 0; i < count * columns; ++i) {
        const int64_t row = indices[i / columns];
        expected.Set(i, Decoded(codes[row * columns + i % columns], stats[row]));
      }
      Describe("int8 rows to %s, %d of %d columns%s", expected.format().name, static_cast<int>(count),
               static_cast<int>(columns), chosen ? ", by index" : "");
      for (const At at : kSides) {
        const int8_t* codes_given = codes_in.Input(codes.data(), rows * columns, at);
        const float* stats_given = stats_in.Input(stats.data(), rows, at);
        const int64_t* indices_given = chosen ? indices_in.Input(indices.data(), count, at) : nullptr;
        ForTargets([&] {
          uint8_t* values = out.Output(count * columns * expected.Bytes(), at);
          RUN(bnb_cpu_int8_vectorwise_dequant(dtype, rows, columns, codes_given, stats_given, indices_given, count,
                                              values, 1));
          out.CheckWritten();
          CheckSame(values, expected);
        });
      }
    }
  }
}

// --- Products --------------------------------------------------------------------------------------------------------

// Factors of a product, with what turns it into values, and the oracle's results.
struct Product {
  Product(Random* random, int64_t m, int64_t n, int64_t k, int64_t outliers)
      : m(m), n(n), k(k), a(Vector<int8_t>(m * k)), b(Vector<int8_t>(n * k)), sums(Vector<int32_t>(m * n)) {
    for (int8_t& code : a) code = AnyCode(random);
    for (int8_t& code : b) code = AnyCode(random);
    for (int64_t i = 0; i < m * n; ++i) {
      uint32_t sum = 0;
      for (int64_t j = 0; j < k; ++j) sum += static_cast<uint32_t>(a[i / n * k + j] * b[i % n * k + j]);
      sums[i] = static_cast<int32_t>(sum);
    }
    for (int64_t i = 0; i < m; ++i) row_stats.push_back(random->Below(16) == 0 ? INFINITY : random->Normal());
    for (int64_t i = 0; i < n; ++i) col_stats.push_back(random->Below(16) == 0 ? NAN : random->Normal());
    for (int64_t i = 0; i < n; ++i) bias.push_back(random->Normal() * 100);
    for (int64_t i = 0; i < outliers; ++i) outlier_cols.push_back(random->Below(k));
    for (int64_t i = 0; i < m * outliers; ++i) outlier_values.push_back(random->Normal() * 10);
  }
  // In the order of the rule: one rounding for each operation.
  float Value(int64_t i, bool with_bias) const {
    const float value =
        row_stats[i / n] * col_stats[i % n] * static_cast<float>(sums[i]) * static_cast<float>(1.0 / (127 * 127));
    return with_bias ? value + bias[i % n] : value;
  }

  int64_t m, n, k;
  std::vector<int8_t> a, b;
  std::vector<int32_t> sums;
  std::vector<float> row_stats, col_stats, bias, outlier_values;
  std::vector<int64_t> outlier_cols;
};

void TestProducts() {
  constexpr int64_t kM[] = {0, 1, 2, 3, 4, 5, 8, 17, 33, 100}, kN[] = {0, 1, 2, 3, 5, 15, 16, 31, 33, 70, 130};
  Random random(11);
  std::vector<int64_t> depths;
  for (int64_t k = 0; k <= 200; ++k) depths.push_back(k);
  for (const int64_t k : {255, 256, 257, 1000, 1024, 1025, 4099}) depths.push_back(k);
  for (const int64_t k : depths) {
    // All sizes in turn at small depths, and a long product of one row.
    const int64_t m = k > 1000 ? 5 : kM[random.Below(10)], n = k > 1000 ? 33 : kN[random.Below(11)];
    const bool has_bias = random.Below(2) != 0;
    const Product p(&random, m, n, k, 0);
    Guarded<int8_t> a_in(m * k), b_in(n * k);
    Guarded<int32_t> sums_in(m * n), sums(m * n);
    Guarded<float> rows_in(m), columns_in(n), bias_in(n);
    Guarded<uint8_t> out(m * n * 4);
    Describe("int8 product, m %d, n %d, k %d", static_cast<int>(m), static_cast<int>(n), static_cast<int>(k));
    for (const At at : kSides) {
      const int8_t *a = a_in.Input(p.a.data(), m * k, at), *b = b_in.Input(p.b.data(), n * k, at);
      const int32_t* product = sums_in.Input(p.sums.data(), m * n, at);
      const float* rows = rows_in.Input(p.row_stats.data(), m, at);
      const float* columns = columns_in.Input(p.col_stats.data(), n, at);
      const float* bias = has_bias ? bias_in.Input(p.bias.data(), n, at) : nullptr;
      ForTargets([&] {
        int32_t* result = sums.Output(m * n, at);
        RUN(bnb_cpu_int8_linear_matmul(m, n, k, a, b, result, 1));
        sums.CheckWritten();
        for (int64_t i = 0; i < m * n; ++i) CHECK(result[i] == p.sums[i]);
      });
      for (const int dtype : kDtypes) {
        Tensor expected(dtype, m * n);
        for (int64_t i = 0; i < m * n; ++i) expected.Set(i, p.Value(i, has_bias));
        ForTargets([&] {
          uint8_t* values = out.Output(m * n * expected.Bytes(), at);
          RUN(bnb_cpu_int8_mm_dequant(dtype, m, n, product, rows, columns, bias, values, 1));
          out.CheckWritten();
          CheckSame(values, expected);
          values = out.Output(m * n * expected.Bytes(), at);
          RUN(bnb_cpu_int8_scaled_mm(dtype, m, n, k, a, b, rows, columns, bias, 0, nullptr, nullptr, values, 1));
          out.CheckWritten();
          CheckSame(values, expected);
        });
      }
    }
  }
}

// A sum that does not fit 32 bits wraps; all sums of 16-bit pairs are as large as they can be.
void TestExtremes() {
  for (const int64_t k : {64, 1000, 140003}) {
    const std::vector<int8_t> a(static_cast<size_t>(k), -128), b(static_cast<size_t>(k), 127);
    ForTargets([&] {
      int32_t result;
      RUN(bnb_cpu_int8_linear_matmul(1, 1, k, a.data(), a.data(), &result, 1));
      CHECK(static_cast<uint32_t>(result) == static_cast<uint32_t>(k * 128 * 128));
      RUN(bnb_cpu_int8_linear_matmul(1, 1, k, a.data(), b.data(), &result, 1));
      CHECK(static_cast<uint32_t>(result) == static_cast<uint32_t>(k * -128 * 127));
    });
  }
}

void TestOutliers() {
  Random random(12);
  for (int64_t outliers = 1; outliers <= 70; ++outliers) {
    const int64_t m = 1 + random.Below(20), n = 1 + random.Below(70), k = 1 + random.Below(100);
    const Product p(&random, m, n, k, outliers);
    Describe("int8 product, m %d, n %d, k %d, %d outliers", static_cast<int>(m), static_cast<int>(n),
             static_cast<int>(k), static_cast<int>(outliers));
    Guarded<int8_t> b_in(n * k);
    Guarded<int64_t> cols_in(outliers);
    Guarded<float> values_in(m * outliers), out(m * n);
    for (const At at : kSides) {
      const int8_t* b = b_in.Input(p.b.data(), n * k, at);
      const int64_t* cols = cols_in.Input(p.outlier_cols.data(), outliers, at);
      const float* values = values_in.Input(p.outlier_values.data(), m * outliers, at);
      ForTargets([&] {
        float* result = out.Output(m * n, at);
        RUN(bnb_cpu_int8_scaled_mm(BNB_FP32, m, n, k, p.a.data(), b, p.row_stats.data(), p.col_stats.data(),
                                   p.bias.data(), outliers, cols, values, result, 1));
        out.CheckWritten();
        for (int64_t i = 0; i < m * n; ++i) {
          double exact = 0, magnitude = 0;
          for (int64_t j = 0; j < outliers; ++j) {
            const double product = static_cast<double>(p.outlier_values[i / n * outliers + j]) *
                                   Decoded(p.b[i % n * k + p.outlier_cols[j]], p.col_stats[i % n]);
            exact += product;
            magnitude += fabs(product);
          }
          // The sum over the outliers, and then two additions that round to nearest.
          double allowed = static_cast<double>(2 * outliers) * 0x1p-23 * magnitude;
          const double rest = p.Value(i, false);
          exact += rest + p.bias[i % n];
          allowed += 2 * 0x1p-24 * (magnitude + fabs(rest) + fabsf(p.bias[i % n]));
          CHECK(isfinite(exact) ? fabs(result[i] - exact) <= allowed : !isfinite(result[i]));
        }
      });
    }
  }
}

// --- Threads and arguments -------------------------------------------------------------------------------------------

void TestThreads() {
  constexpr int64_t kRows = 203, kColumns = 1031;
  Random random(13);
  Tensor x(BNB_BF16, kRows * kColumns);
  Fill(&random, &x);
  CheckThreads([&](int threads) {
    std::vector<int8_t> codes(kRows * kColumns);
    std::vector<float> stats(kRows);
    std::vector<uint8_t> outliers(kColumns), out(kRows * kColumns * 2);
    RUN(bnb_cpu_int8_vectorwise_quant(BNB_BF16, kRows, kColumns, x.bytes.data(), 2, codes.data(), stats.data(),
                                      outliers.data(), threads));
    RUN(bnb_cpu_int8_vectorwise_dequant(BNB_BF16, kRows, kColumns, codes.data(), stats.data(), nullptr, kRows,
                                        out.data(), threads));
    out.insert(out.end(), outliers.begin(), outliers.end());
    return out;
  });
  const Product p(&random, 150, 200, 300, 7);
  CheckThreads([&](int threads) {
    std::vector<uint8_t> out(150 * 200 * 4);
    RUN(bnb_cpu_int8_scaled_mm(BNB_FP32, p.m, p.n, p.k, p.a.data(), p.b.data(), p.row_stats.data(), p.col_stats.data(),
                               nullptr, 7, p.outlier_cols.data(), p.outlier_values.data(), out.data(), threads));
    return out;
  });
}

int Quant(int dtype, int64_t rows, int64_t columns) {
  return bnb_cpu_int8_vectorwise_quant(dtype, rows, columns, Nowhere(), 1, Nowhere<int8_t>(), Nowhere<float>(),
                                       Nowhere<uint8_t>(), 1);
}
int Dequant(int dtype, int64_t rows, int64_t columns, const int64_t* indices, int64_t count) {
  return bnb_cpu_int8_vectorwise_dequant(dtype, rows, columns, Nowhere<int8_t>(), Nowhere<float>(), indices, count,
                                         Nowhere(), 1);
}
int Matmul(int64_t m, int64_t n, int64_t k) {
  return bnb_cpu_int8_linear_matmul(m, n, k, Nowhere<int8_t>(), Nowhere<int8_t>(), Nowhere<int32_t>(), 1);
}
int MmDequant(int dtype, int64_t m, int64_t n) {
  return bnb_cpu_int8_mm_dequant(dtype, m, n, Nowhere<int32_t>(), Nowhere<float>(), Nowhere<float>(), Nowhere<float>(),
                                 Nowhere(), 1);
}
int ScaledMm(int dtype, int64_t m, int64_t n, int64_t k, int64_t outliers) {
  return bnb_cpu_int8_scaled_mm(dtype, m, n, k, Nowhere<int8_t>(), Nowhere<int8_t>(), Nowhere<float>(),
                                Nowhere<float>(), Nowhere<float>(), outliers, Nowhere<int64_t>(), Nowhere<float>(),
                                Nowhere(), 1);
}

void TestArguments() {
  ForTargets([] {
    for (const int wrong : {-1, 3, 1 << 30}) {
      REFUSED(Quant(wrong, 2, 2));
      REFUSED(Dequant(wrong, 2, 2, nullptr, 2));
      REFUSED(MmDequant(wrong, 2, 2));
      REFUSED(ScaledMm(wrong, 2, 2, 2, 2));
    }
    for (const int64_t wrong : {int64_t{-1}, INT64_MIN}) {
      REFUSED(Quant(BNB_FP32, wrong, 2));
      REFUSED(Quant(BNB_FP32, 2, wrong));
      REFUSED(Dequant(BNB_FP32, wrong, 2, nullptr, 0));
      REFUSED(Dequant(BNB_FP32, 2, wrong, nullptr, 2));
      REFUSED(Dequant(BNB_FP32, 2, 2, nullptr, wrong));
      REFUSED(Matmul(wrong, 2, 2));
      REFUSED(Matmul(2, wrong, 2));
      REFUSED(Matmul(2, 2, wrong));
      REFUSED(MmDequant(BNB_FP32, wrong, 2));
      REFUSED(MmDequant(BNB_FP32, 2, wrong));
      REFUSED(ScaledMm(BNB_FP32, wrong, 2, 2, 2));
      REFUSED(ScaledMm(BNB_FP32, 2, wrong, 2, 2));
      REFUSED(ScaledMm(BNB_FP32, 2, 2, wrong, 2));
      REFUSED(ScaledMm(BNB_FP32, 2, 2, 2, wrong));
    }
    REFUSED(Dequant(BNB_FP32, 2, 2, nullptr, 3));   // past the table
    CHECK(strcmp(bnb_cpu_last_target(), "") == 0);  // no kernel ran

    for (const int64_t wrong : {int64_t{-1}, int64_t{2}, INT64_MIN, INT64_MAX}) {
      const int64_t indices[] = {0, wrong};
      CHECK(Dequant(BNB_FP32, 2, 2, indices, 2) == BNB_INDEX_OUT_OF_RANGE);
    }
    RUN(Quant(BNB_FP32, 0, 3));
    RUN(Dequant(BNB_FP32, 0, 3, nullptr, 0));
    RUN(Matmul(0, 3, 3));
    RUN(Matmul(3, 0, 3));
    RUN(MmDequant(BNB_FP32, 0, 3));
    RUN(ScaledMm(BNB_FP32, 0, 3, 3, 0));
    RUN(ScaledMm(BNB_FP32, 3, 0, 3, 0));
  });
}

}  // namespace

int main(int argc, char** argv) {
  return RunTests(argc, argv,
                  {{"arguments", TestArguments},
                   {"quantize", TestQuantize},
                   {"ties", TestTies},
                   {"dequantize", TestDequantize},
                   {"products", TestProducts},
                   {"extremes", TestExtremes},
                   {"outliers", TestOutliers},
                   {"threads", TestThreads}});
}
