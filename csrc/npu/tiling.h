// How the work of an operator is cut into shares of cores and tiles of the unified buffer (UB): integers only, the same
// code on the host, in the kernels and in the tests. A tiling is a plain struct that travels by value.
#pragma once

#include <cstdint>

#ifndef BNB_AICORE
#define BNB_AICORE  // what marks device functions; the kernels define it before they include this file
#endif

namespace bnb {
namespace npu {

// What the host asks the platform for.
struct Platform {
  uint32_t cores;     // vector cores that this stream may use
  uint32_t ub_bytes;  // the whole UB of a core
};

// The end of the UB that belongs to the API: Select keeps its temporaries in 8 KiB, the last 256 B are the runtime's
// (asc-devkit, "Select" and "NPU architecture 2201").
constexpr uint32_t kReservedUb = 8 * 1024 + 256;

constexpr uint32_t kMaxTile = 16384;    // elements
constexpr uint32_t kBlockBytes = 32;    // of a data block, the unit of every UB address
constexpr uint32_t kNestedBlock = 256;  // quantisation blocks that share a second-level statistic
constexpr uint32_t kLevels4 = 16;
constexpr uint32_t kPoints4 = 15;
constexpr uint32_t kMapSize = 256;

BNB_AICORE constexpr uint32_t RoundUp(uint32_t value, uint32_t to) { return (value + to - 1) / to * to; }
BNB_AICORE constexpr int64_t CeilDiv(int64_t a, int64_t b) { return a / b + (a % b != 0 ? 1 : 0); }

// `n` elements for `cores` cores, in whole units. Every core has work: there are never more cores than units.
struct Shares {
  int64_t n;
  int64_t units_per_core;  // the first `extra` cores have one more
  uint32_t extra;
  uint32_t cores;  // blocks to launch; 0 if there is nothing to do
  uint32_t unit;   // elements

  BNB_AICORE constexpr int64_t Begin(int64_t core) const {
    const int64_t first = core * units_per_core + (core < extra ? core : extra);
    // Compared in units: the end of the last unit may lie beyond what 64 bits hold.
    return first > n / unit ? n : first * unit;
  }
  BNB_AICORE constexpr int64_t End(int64_t core) const { return Begin(core + 1); }
};

constexpr Shares MakeShares(int64_t n, uint32_t unit, uint32_t cores) {
  const int64_t units = n > 0 ? CeilDiv(n, unit) : 0;
  const int64_t used = units < cores ? units : cores;
  return {n > 0 ? n : 0, used > 0 ? units / used : 0, static_cast<uint32_t>(used > 0 ? units % used : 0),
          static_cast<uint32_t>(used), unit};
}

// A tile ends where a multiple of its size is, so it never straddles one, wherever a share begins.
BNB_AICORE constexpr int64_t TileEnd(int64_t begin, int64_t end, uint32_t tile) {
  const int64_t left = tile - begin % tile;
  return end - begin < left ? end : begin + left;
}

// The largest power of two from `smallest` to `largest` whose buffers fit; 0 if none does.
template <typename Layout>
constexpr uint32_t LargestTile(uint32_t smallest, uint32_t largest, const Layout& layout, const Platform& platform) {
  for (uint32_t tile = largest; tile >= smallest && tile > 0; tile /= 2) {
    if (static_cast<uint64_t>(layout.Bytes(tile)) + kReservedUb <= platform.ub_bytes) return tile;
  }
  return 0;
}

constexpr bool IsPowerOfTwo(uint32_t value) { return value != 0 && (value & (value - 1)) == 0; }
constexpr bool IsBlocksize4(uint32_t blocksize) {
  return IsPowerOfTwo(blocksize) && blocksize >= 32 && blocksize <= 4096;
}

// Shares begin at multiples of 512 packed bytes, as transfers prefer (asc-devkit, "GM addresses aligned to 512 B").
constexpr uint32_t kUnit4 = 1024;
constexpr uint32_t Unit4(uint32_t blocksize) { return blocksize > kUnit4 ? blocksize : kUnit4; }

// --- Decoding 4 bits -------------------------------------------------------------------------------------------------

// Sizes of the buffers in bytes. The kernel and the choice of the tile both ask here.
struct Decode4bitLayout {
  uint32_t blocksize;
  uint32_t out_size;  // bytes of an element of the output
  bool nested;

  // Blocks whose table one Gather reads. Byte offsets are computed in half, which holds multiples of 2 up to 4096 and
  // multiples of 4 up to 8192: 128 tables of 16 entries.
  static constexpr uint32_t kGroup = 128;

  BNB_AICORE constexpr uint32_t Blocks(uint32_t tile) const { return RoundUp(tile / blocksize, 8); }
  BNB_AICORE constexpr uint32_t Packed(uint32_t tile) const { return RoundUp(tile / 2, kBlockBytes); }
  BNB_AICORE constexpr uint32_t Absmax(uint32_t tile) const { return nested ? kBlockBytes : Scales(tile); }
  BNB_AICORE constexpr uint32_t Codes(uint32_t tile) const { return RoundUp(Blocks(tile), kBlockBytes); }
  BNB_AICORE constexpr uint32_t Scales(uint32_t tile) const { return Blocks(tile) * 4; }
  BNB_AICORE constexpr uint32_t Scratch(uint32_t tile) const {
    const uint32_t products = Blocks(tile) * (kBlockBytes + kLevels4 * 4);
    return products > tile * 4 ? products : tile * 4;
  }
  BNB_AICORE constexpr uint32_t Group(uint32_t tile) const {
    return tile < kGroup * blocksize ? tile : kGroup * blocksize;
  }
  BNB_AICORE constexpr uint32_t Table(uint32_t tile) const { return Blocks(tile) * kLevels4 * out_size; }
  static constexpr uint32_t kConstants = kLevels4 * 4 + 3 * kBlockBytes;
  static constexpr uint32_t kNested = kMapSize * 4 + 2 * kBlockBytes;

  BNB_AICORE constexpr uint32_t Bytes(uint32_t tile) const {
    const uint32_t queues = 2 * (Packed(tile) + Absmax(tile) + (nested ? Codes(tile) : 0));
    return queues + Scratch(tile) + Group(tile) * 2 + Table(tile) + kConstants + (nested ? kNested + Scales(tile) : 0);
  }
};

struct Decode4bitTiling {
  uint32_t tile;  // at most kNestedBlock blocks, so that one second-level statistic serves it
  uint32_t blocksize;
  uint32_t nested;
  float levels[kLevels4];  // in code order
};

// The tile is 0 if the UB is too small. `levels` has 16 entries.
template <typename Layout>
constexpr Decode4bitTiling TileDecode4bit(uint32_t blocksize, bool nested, const float* levels, uint32_t largest,
                                          const Layout& layout, const Platform& platform) {
  const uint32_t most = kNestedBlock * blocksize < largest ? kNestedBlock * blocksize : largest;
  Decode4bitTiling tiling{LargestTile(blocksize, most, layout, platform), blocksize, nested ? 1u : 0u, {}};
  for (uint32_t i = 0; i < kLevels4; ++i) tiling.levels[i] = levels[i];
  return tiling;
}

// --- dequantize_4bit -------------------------------------------------------------------------------------------------

struct Dequantize4bitLayout {
  Decode4bitLayout decode;
  constexpr uint32_t Bytes(uint32_t tile) const { return decode.Bytes(tile) + 2 * tile * decode.out_size; }
};

struct Dequantize4bitTiling {
  Shares shares;
  Decode4bitTiling decode;
};

constexpr Dequantize4bitTiling TileDequantize4bit(int64_t n, uint32_t blocksize, uint32_t out_size, bool nested,
                                                  const float* levels, const Platform& platform) {
  const Dequantize4bitLayout layout{{blocksize, out_size, nested}};
  return {MakeShares(n, Unit4(blocksize), platform.cores),
          TileDecode4bit(blocksize, nested, levels, kMaxTile, layout, platform)};
}

// --- gemv_4bit -------------------------------------------------------------------------------------------------------

constexpr uint32_t kGemvBatch = 8;        // rows of the input at most
constexpr uint32_t kGemvRows = 64;        // rows of the weight whose results are written together
constexpr int64_t kResident = 64 * 1024;  // bytes of an input that stays in the UB

struct Gemv4bitLayout {
  Decode4bitLayout decode;  // to fp32
  uint32_t size;            // bytes of an element of the input and the output
  uint32_t batch;
  uint32_t resident;  // columns of the input if all of it stays in the UB, else 0

  BNB_AICORE constexpr uint32_t InputBuffers() const { return resident != 0 ? 1 : 2; }
  BNB_AICORE constexpr uint32_t Inputs(uint32_t tile) const { return batch * (resident != 0 ? resident : tile) * size; }
  BNB_AICORE constexpr uint32_t Out() const { return batch * kGemvRows * size; }
  BNB_AICORE constexpr uint32_t Weight(uint32_t tile) const { return tile * 4; }
  BNB_AICORE constexpr uint32_t Products(uint32_t tile) const { return RoundUp(tile, 64) * 4; }
  BNB_AICORE constexpr uint32_t Sums(uint32_t tile) const {
    const uint32_t partial = RoundUp(tile / 8, 64), results = batch * kGemvRows;
    return (partial > results ? partial : results) * 4;
  }
  BNB_AICORE constexpr uint32_t Results() const { return batch * kGemvRows * kBlockBytes; }

  constexpr uint32_t Bytes(uint32_t tile) const {
    return decode.Bytes(tile) + InputBuffers() * Inputs(tile) + 2 * Out() + Weight(tile) + Products(tile) + Sums(tile) +
           Results();
  }
};

struct Gemv4bitTiling {
  Shares shares;  // of the rows of the weight
  Decode4bitTiling decode;
  int64_t columns;
  uint32_t batch;
  uint32_t resident;
};

// For whole blocks in a row: `columns` is a multiple of the blocksize.
constexpr Gemv4bitTiling TileGemv4bit(int64_t rows, int64_t columns, uint32_t batch, uint32_t blocksize, uint32_t size,
                                      bool nested, const float* levels, const Platform& platform) {
  // Reading the input again for every row of the weight costs more than the smaller tile.
  const bool fits = columns <= kResident / (batch * size);
  const uint32_t resident = fits ? static_cast<uint32_t>(columns) : 0;
  const Gemv4bitLayout layout{{blocksize, 4, nested}, size, batch, resident};
  // A tile is summed by one instruction of at most 255 repeats.
  return {MakeShares(rows, 1, platform.cores), TileDecode4bit(blocksize, nested, levels, 8192, layout, platform),
          columns, batch, resident};
}

// --- Quantising ------------------------------------------------------------------------------------------------------

// What both ways of quantising keep in the UB.
struct QuantizeLayout {
  uint32_t blocksize;
  uint32_t in_size;  // bytes of an element of the input

  static constexpr uint32_t kMasks = kPoints4 + 1;
  static constexpr uint32_t kStatistics = 3;

  // Comparisons take whole repeats of 64 elements.
  BNB_AICORE constexpr uint32_t Granule() const { return blocksize < 64 ? 64 : blocksize; }
  BNB_AICORE constexpr uint32_t In(uint32_t tile) const { return tile * in_size; }
  BNB_AICORE constexpr uint32_t Values(uint32_t tile) const { return tile * 4; }
  BNB_AICORE constexpr uint32_t Statistic(uint32_t tile) const { return RoundUp(tile / blocksize, 64) * 4; }
  BNB_AICORE constexpr uint32_t Mask(uint32_t tile) const { return tile / 8; }

  // The queues of the input and of the statistics, and what the computation needs.
  constexpr uint32_t Shared(uint32_t tile) const {
    return 2 * (In(tile) + Statistic(tile)) + (in_size == 4 ? 0 : Values(tile)) + kMasks * Mask(tile) +
           kStatistics * Statistic(tile);
  }
};

// --- quantize_4bit ---------------------------------------------------------------------------------------------------

struct Quantize4bitLayout : QuantizeLayout {
  BNB_AICORE constexpr uint32_t Packed(uint32_t tile) const { return tile / 2; }
  BNB_AICORE constexpr uint32_t Scratch(uint32_t tile) const { return tile * 6; }

  constexpr uint32_t Bytes(uint32_t tile) const {
    return Shared(tile) + 2 * Packed(tile) + Scratch(tile) + 3 * kBlockBytes;
  }
};

struct Quantize4bitTiling {
  Shares shares;
  uint32_t tile;
  uint32_t blocksize;
  uint32_t fp4;            // else NF4
  float points[kPoints4];  // decision points, ascending: 15 between the levels, for FP4 7 between the magnitudes
};

constexpr Quantize4bitTiling TileQuantize4bit(int64_t n, uint32_t blocksize, uint32_t in_size, bool fp4,
                                              const float* points, const Platform& platform) {
  const Quantize4bitLayout layout{{blocksize, in_size}};
  const uint32_t smallest = blocksize < 256 ? 256 : blocksize;
  const uint32_t most = kNestedBlock * blocksize < kMaxTile ? kNestedBlock * blocksize : kMaxTile;
  Quantize4bitTiling tiling{MakeShares(n, Unit4(blocksize), platform.cores),
                            LargestTile(smallest, most, layout, platform),
                            blocksize,
                            fp4 ? 1u : 0u,
                            {}};
  for (uint32_t i = 0; i < (fp4 ? kPoints4 / 2 : kPoints4); ++i) tiling.points[i] = points[i];
  return tiling;
}

// --- dequantize_blockwise --------------------------------------------------------------------------------------------

constexpr bool IsBlocksize8(uint32_t blocksize) { return IsPowerOfTwo(blocksize) && blocksize >= 32; }

struct DequantizeBlockwiseLayout {
  uint32_t blocksize;
  uint32_t out_size;  // bytes of an element of the output

  BNB_AICORE constexpr uint32_t InTile(uint32_t tile) const { return blocksize < tile ? blocksize : tile; }
  BNB_AICORE constexpr uint32_t Blocks(uint32_t tile) const { return RoundUp(tile / InTile(tile), 8); }
  BNB_AICORE constexpr uint32_t Codes(uint32_t tile) const { return tile; }
  BNB_AICORE constexpr uint32_t Absmax(uint32_t tile) const { return Blocks(tile) * 4; }
  BNB_AICORE constexpr uint32_t Out(uint32_t tile) const { return tile * out_size; }
  BNB_AICORE constexpr uint32_t Offsets(uint32_t tile) const { return tile * 4; }
  BNB_AICORE constexpr uint32_t Copies(uint32_t tile) const { return Blocks(tile) * kBlockBytes; }
  BNB_AICORE constexpr uint32_t Products(uint32_t tile) const { return tile * 4; }

  constexpr uint32_t Bytes(uint32_t tile) const {
    return 2 * (Codes(tile) + Absmax(tile) + Out(tile)) + kMapSize * 4 + Offsets(tile) + Copies(tile) +
           (out_size == 4 ? 0 : Products(tile));
  }
};

struct DequantizeBlockwiseTiling {
  Shares shares;
  uint32_t tile;
  uint32_t blocksize;
};

constexpr DequantizeBlockwiseTiling TileDequantizeBlockwise(int64_t n, uint32_t blocksize, uint32_t out_size,
                                                            const Platform& platform) {
  const DequantizeBlockwiseLayout layout{blocksize, out_size};
  // Brcb repeats 255 times at most, for 8 blocks each: a tile of the smallest blocks is what it takes.
  const uint32_t tile = LargestTile(1024, 8192, layout, platform);
  // A share begins with a block, or with a tile in a larger block.
  return {MakeShares(n, Unit4(tile == 0 ? blocksize : layout.InTile(tile)), platform.cores), tile, blocksize};
}

// --- quantize_blockwise ----------------------------------------------------------------------------------------------

struct QuantizeBlockwiseLayout : QuantizeLayout {
  BNB_AICORE constexpr uint32_t Codes(uint32_t tile) const { return tile; }
  BNB_AICORE constexpr uint32_t Scratch(uint32_t tile) const { return tile * 12; }

  constexpr uint32_t Bytes(uint32_t tile) const {
    return Shared(tile) + 2 * Codes(tile) + kMapSize * 4 + Scratch(tile) + kBlockBytes;
  }
};

struct QuantizeBlockwiseTiling {
  Shares shares;
  uint32_t tile;
  uint32_t blocksize;
};

// For blocksizes up to 4096: the largest magnitude of a block is found within a tile.
constexpr QuantizeBlockwiseTiling TileQuantizeBlockwise(int64_t n, uint32_t blocksize, uint32_t in_size,
                                                        const Platform& platform) {
  const QuantizeBlockwiseLayout layout{{blocksize, in_size}};
  const uint32_t smallest = blocksize < 256 ? 256 : blocksize;
  return {MakeShares(n, Unit4(blocksize), platform.cores), LargestTile(smallest, 8192, layout, platform), blocksize};
}

}  // namespace npu
}  // namespace bnb
