// Properties of csrc/npu/tiling.h, for sizes that a machine could not hold as well.
#include "npu/tiling.h"

#include <cstring>
#include <type_traits>
#include <vector>

#include "check.h"

namespace {

using namespace bnb::npu;

constexpr float kAnyLevels[kLevels4] = {};
constexpr uint32_t kUb = 192 * 1024;

static_assert(std::is_trivially_copyable_v<Dequantize4bitTiling> && std::is_standard_layout_v<Dequantize4bitTiling>,
              "a kernel takes it by value");
static_assert(std::is_trivially_copyable_v<Quantize4bitTiling> && std::is_standard_layout_v<Quantize4bitTiling>);
static_assert(TileDequantize4bit(1, 64, 2, false, kAnyLevels, {40, kUb}).shares.cores == 1, "one block needs one core");

// Shares cover [0, n) once, in order, each begins with a unit, and none is empty.
void CheckShares(int64_t n, uint32_t unit, uint32_t cores) {
  const Shares shares = MakeShares(n, unit, cores);
  CHECK(shares.cores <= cores);
  CHECK(static_cast<int64_t>(shares.cores) <= CeilDiv(n, unit));
  CHECK((shares.cores == 0) == (n == 0));
  int64_t next = 0;
  for (uint32_t core = 0; core < shares.cores; ++core) {
    CHECK(shares.Begin(core) == next && next % unit == 0);
    next = shares.End(core);
    CHECK(next > shares.Begin(core));
    CHECK(CeilDiv(next - shares.Begin(core), unit) <= shares.units_per_core + 1);
  }
  CHECK(next == n);
}

// Tiles cover a share once; none straddles a multiple of its size.
void CheckTiles(const Shares& shares, uint32_t tile) {
  for (uint32_t core = 0; core < shares.cores; ++core) {
    int64_t begin = shares.Begin(core);
    const int64_t end = shares.End(core);
    while (begin < end) {
      const int64_t next = TileEnd(begin, end, tile);
      CHECK(next > begin && next <= end && next - begin <= tile);
      CHECK(begin / tile == (next - 1) / tile);
      CHECK(begin % shares.unit == 0 || begin % tile == 0);
      begin = next;
      if (end - begin > int64_t{1} << 24) begin = end - (end % tile) - 2 * int64_t{tile};  // the middle is alike
    }
    CHECK(begin == end);
  }
}

void Sizes(std::vector<int64_t>* sizes) {
  for (int64_t n = 0; n <= 200; ++n) sizes->push_back(n);
  // Where an earlier public kernel failed: fewer blocks than 40 shares have room for, odd sizes, large blocks.
  for (const int64_t n :
       {100, 2496, 2560, 2561, 2563, 2567, 2569, 4096, 4992, 7488, 8192, 10000, 97344, 1 << 20, 6230016}) {
    for (int64_t d = -2; d <= 2; ++d) sizes->push_back(n + d);
  }
  // The weights of SmolLM2-135M, Llama-3-8B and Qwen-Image.
  constexpr int64_t kShapes[][2] = {{576, 576},    {192, 576},     {1536, 576},  {576, 1536},
                                    {49152, 576},  {4096, 4096},   {1024, 4096}, {14336, 4096},
                                    {4096, 14336}, {128256, 4096}, {3072, 3072}, {12288, 3072},
                                    {3072, 12288}, {18432, 3072},  {3072, 3584}, {64, 3072}};
  for (const auto& shape : kShapes) sizes->push_back(shape[0] * shape[1]);
  for (const int64_t n : {int64_t{1} << 24, int64_t{1} << 31, int64_t{1} << 32, (int64_t{1} << 32) - 64,
                          int64_t{128256} * 4096 * 9, int64_t{1} << 40, INT64_MAX - 2}) {
    for (int64_t d = -2; d <= 2; ++d) sizes->push_back(n + d);
  }
}

}  // namespace

int main() {
  std::vector<int64_t> sizes;
  Sizes(&sizes);
  for (const int64_t n : sizes) {
    for (const uint32_t cores : {1u, 8u, 20u, 40u, 48u}) {
      for (const uint32_t unit : {32u, 1024u, 4096u}) CheckShares(n, unit, cores);
    }
  }
  for (uint32_t blocksize = 32; blocksize <= 4096; blocksize *= 2) {
    CHECK(IsBlocksize4(blocksize));
    for (const uint32_t out_size : {2u, 4u}) {
      for (const bool nested : {false, true}) {
        const Dequantize4bitLayout layout{{blocksize, out_size, nested}};
        for (const uint32_t ub : {kUb, kUb - 256, 2 * kUb, kUb / 2}) {
          for (const int64_t n : {int64_t{1}, int64_t{100000}, int64_t{1} << 33}) {
            const auto tiling = TileDequantize4bit(n, blocksize, out_size, nested, kAnyLevels, {40, ub});
            CHECK(tiling.decode.tile >= blocksize && tiling.decode.tile % blocksize == 0 &&
                  tiling.decode.tile <= kMaxTile);
            CHECK(layout.Bytes(tiling.decode.tile) + kReservedUb <= ub);
            CHECK(tiling.decode.tile / blocksize <= kNestedBlock &&
                  kNestedBlock % (tiling.decode.tile / blocksize) == 0);
            // The largest offset in a table is a multiple of the element that half holds.
            CHECK(layout.decode.kGroup * kLevels4 * out_size <= 2048 * out_size);
            CheckTiles(tiling.shares, tiling.decode.tile);
          }
        }
        CHECK(TileDequantize4bit(1, blocksize, out_size, nested, kAnyLevels, {40, 8192}).decode.tile == 0);
      }
      for (uint32_t batch = 1; batch <= kGemvBatch; ++batch) {
        for (const bool nested : {false, true}) {
          const auto tiling = TileGemv4bit(128256, 8192, batch, blocksize, out_size, nested, kAnyLevels, {40, kUb});
          const Gemv4bitLayout gemv{{blocksize, 4, nested}, out_size, batch, tiling.resident};
          // Many rows beside the largest blocks do not fit: the caller decodes instead.
          if (blocksize == 4096 && batch * out_size > 12) {
            CHECK(tiling.decode.tile == 0);
            continue;
          }
          CHECK(tiling.decode.tile >= blocksize);
          CHECK(gemv.Bytes(tiling.decode.tile) + kReservedUb <= kUb && tiling.decode.tile / 64 <= 255);
          CHECK(gemv.Results() / kBlockBytes / 8 <= 255);
        }
      }
      const QuantizeBlockwiseLayout blockwise{{blocksize, out_size}};
      const auto by_map = TileQuantizeBlockwise(123456789, blocksize, out_size, {40, kUb});
      CHECK(by_map.tile >= blockwise.Granule() && blockwise.Bytes(by_map.tile) + kReservedUb <= kUb);
      CheckTiles(by_map.shares, by_map.tile);
      const Quantize4bitLayout layout{{blocksize, out_size}};
      for (const uint32_t ub : {kUb, kUb - 256, 2 * kUb}) {
        for (const bool fp4 : {false, true}) {
          const auto tiling = TileQuantize4bit(123456789, blocksize, out_size, fp4, kAnyLevels, {40, ub});
          CHECK(tiling.tile >= layout.Granule() && tiling.tile % layout.Granule() == 0 && tiling.tile <= kMaxTile);
          CHECK(layout.Bytes(tiling.tile) + kReservedUb <= ub);
          CHECK(layout.Mask(tiling.tile) % kBlockBytes == 0 && tiling.tile / blocksize <= kNestedBlock);
          CheckTiles(tiling.shares, tiling.tile);
        }
      }
    }
  }
  for (uint32_t blocksize = 32; blocksize != 0; blocksize *= 2) {
    CHECK(IsBlocksize8(blocksize));
    for (const uint32_t out_size : {2u, 4u}) {
      const DequantizeBlockwiseLayout layout{blocksize, out_size};
      const auto tiling = TileDequantizeBlockwise((int64_t{1} << 33) + 5, blocksize, out_size, {48, kUb});
      CHECK(tiling.tile > 0 && tiling.tile <= kMaxTile && layout.Bytes(tiling.tile) + kReservedUb <= kUb);
      CHECK(layout.Blocks(tiling.tile) <= 8 * 255 && tiling.shares.unit % layout.InTile(tiling.tile) == 0);
      CheckTiles(tiling.shares, tiling.tile);
    }
  }
  for (const uint32_t blocksize : {0u, 16u, 33u, 48u, 96u, 8192u}) CHECK(!IsBlocksize4(blocksize));
  return 0;
}
