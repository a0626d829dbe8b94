// The 4-bit levels and their decision points. bitsandbytes/formats.py holds the same numbers and their sources; a test
// compares the two.
#pragma once

namespace bnb {

constexpr int kLevels = 16;
constexpr int kZeroNF4 = 7;  // the code of 0, which fills the last low nibble of an odd number of elements
constexpr int kZeroFP4 = 0;
constexpr int kSignFP4 = 8;

constexpr float kNF4[kLevels] = {
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

// In code order: sign, two exponent bits, one mantissa bit. Divided in double precision and rounded once, as in Python.
static constexpr float Twelfth(double value) { return static_cast<float>(value / 12.0); }
constexpr float kFP4[kLevels] = {
    Twelfth(0), Twelfth(0.0625),  Twelfth(8),  Twelfth(12),  Twelfth(4),  Twelfth(6),  Twelfth(2),  Twelfth(3),
    Twelfth(0), Twelfth(-0.0625), Twelfth(-8), Twelfth(-12), Twelfth(-4), Twelfth(-6), Twelfth(-2), Twelfth(-3),
};

// kMagnitudesFP4[k] is the code of the k-th smallest magnitude.
constexpr int kMagnitudesFP4[kSignFP4] = {0, 1, 6, 7, 4, 5, 2, 3};

// Point i lies between level i and level i + 1 (FP4: between the magnitudes), in one fp32 operation each.
static constexpr float Midpoint(float a, float b) { return (a + b) / 2.0f; }
static constexpr float PointNF4(int i) { return Midpoint(kNF4[i], kNF4[i + 1]); }
static constexpr float PointFP4(int i) { return Midpoint(kFP4[kMagnitudesFP4[i]], kFP4[kMagnitudesFP4[i + 1]]); }

}  // namespace bnb
