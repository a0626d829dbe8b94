// The modelled chip and its costs. None of this is measured here: documented rates, and assumptions where there is no
// document. Times are cycles of one vector core.
#pragma once

#include <cstdint>

namespace sim {

struct Chip {
  const char* name;
  uint32_t cores;           // vector cores
  double hertz;             // of a core. No document gives the vector clock; this is the cube_freq of the platform file
  double hbm;               // bytes a second, all cores together (asc-devkit, "L2 cache splitting": about 1.6 TB/s)
  uint32_t ub_bytes;        // 192 KiB (asc-devkit, "NPU architecture 2201")
  double load_bytes = 32;   // a cycle and core at most, GM to UB (platform file: ddr rate)
  double store_bytes = 64;  // a cycle and core at most, UB to GM (platform file: ub_to_ddr rate)
};

constexpr Chip kAscend910B3{"Ascend910B3", 40, 1.8e9, 1.6e12, 192 * 1024};

// Memory that the API and the runtime keep for themselves at the end of the UB.
constexpr uint32_t kReserved = 8 * 1024 + 256;

namespace cost {
// Assumed: every vector instruction takes this much before its first element. Fits on hardware in the cost model of
// pto-isa lie between 2 and 14 for most.
constexpr double kVectorStart = 6;
// Assumed: every transfer occupies its queue this much beside its bytes.
constexpr double kTransferStart = 100;
// Assumed: the scalar unit needs this long to issue an instruction to another pipe, or to access the UB once.
constexpr double kIssue = 4;
constexpr double kScalarUb = 10;
constexpr double kScalarGm = 500;  // a cache miss

// Elements a cycle: asc-devkit, "theoretical performance of vector instructions", tables 3 to 12.
inline double Rate(double bytes_of_element) { return bytes_of_element >= 4 ? 64 : 128; }
constexpr double kDivRate = 32;
constexpr double kGatherRate = 5;
constexpr double kBrcbRate = 8;  // input elements
}  // namespace cost

}  // namespace sim
