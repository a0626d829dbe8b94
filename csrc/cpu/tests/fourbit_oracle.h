// The 4-bit levels of the oracles.
#pragma once

#include "harness.h"

namespace bnb_test {

constexpr int64_t kBlocksizes[] = {32, 64, 128, 256, 512, 1024, 2048, 4096};
constexpr int kQuantTypes[] = {BNB_NF4, BNB_FP4};

// Dettmers et al. 2023, arXiv:2305.14314, appendix E.
constexpr float kNF4[16] = {
    -1.0f,
    -0.6961928009986877f,
    -0.5250730514526367f,
    -0.39491748809814453f,
    -0.28444138169288635f,
    -0.18477343022823334f,
    -0.09105003625154495f,
    0.0f,
    0.07958029955625534f,
    0.16093020141124725f,
    0.24611230194568634f,
    0.33791524171829224f,
    0.44070982933044434f,
    0.5626170039176941f,
    0.7229568362236023f,
    1.0f,
};
constexpr double kMagnitudesFP4[8] = {0, 1.0 / 192, 2.0 / 3, 1, 1.0 / 3, 1.0 / 2, 1.0 / 6, 1.0 / 4};

inline float Level(int quant_type, int code) {
  if (quant_type == BNB_NF4) return kNF4[code];
  const float magnitude = static_cast<float>(kMagnitudesFP4[code % 8]);
  return code > 8 ? -magnitude : magnitude;
}

inline int CodeAt(const std::vector<uint8_t>& packed, int64_t i) {
  return i % 2 == 0 ? packed[i / 2] / 16 : packed[i / 2] % 16;
}

}  // namespace bnb_test
