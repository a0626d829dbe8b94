// Global memory (GM): the arguments of a launch, each between inaccessible pages.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace sim {

struct Violation : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Region {
  uint8_t* data;
  uint64_t bytes;
  bool output;
};

class Memory {
 public:
  Memory() = default;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() {
    for (const Mapping& mapping : mappings_) munmap(mapping.begin, mapping.bytes);
  }

  // Data that ends where an inaccessible page begins, or begins where one ends.
  uint8_t* Input(const void* values, uint64_t bytes, bool at_end = true) {
    uint8_t* data = Map(bytes, at_end, false);
    if (bytes != 0) std::memcpy(data, values, bytes);
    return data;
  }
  uint8_t* Output(uint64_t bytes, bool at_end = true) {
    uint8_t* data = Map(bytes, at_end, true);
    std::memset(data, 0xA5, bytes);
    return data;
  }
  // As when a caller frees an argument while the kernel still runs.
  void Free(const uint8_t* data) {
    regions_.erase(std::remove_if(regions_.begin(), regions_.end(), [&](const Region& r) { return r.data == data; }),
                   regions_.end());
  }

  const Region* Find(const uint8_t* pointer, uint64_t bytes) const {
    for (const Region& region : regions_) {
      if (pointer >= region.data && pointer <= region.data + region.bytes &&
          bytes <= static_cast<uint64_t>(region.data + region.bytes - pointer)) {
        return &region;
      }
    }
    return nullptr;
  }

  // Notes a write. False if it is not to an output, or if those bytes were written before: blocks run at the same time
  // on a chip, so two that write one byte race, and our kernels write every byte once.
  bool Record(const uint8_t* pointer, uint64_t bytes, uint32_t) {
    const Region* region = Find(pointer, bytes);
    if (region == nullptr || !region->output) return false;
    auto next = std::lower_bound(writes_.begin(), writes_.end(), pointer,
                                 [](const Write& write, const uint8_t* p) { return write.begin < p; });
    if (next != writes_.end() && next->begin < pointer + bytes) return false;
    if (next != writes_.begin() && (next - 1)->end > pointer) return false;
    if (next != writes_.begin() && (next - 1)->end == pointer) {
      (next - 1)->end = pointer + bytes;
    } else {
      writes_.insert(next, {pointer, pointer + bytes});
    }
    return true;
  }
  // Every byte of every output was written.
  void CheckComplete(const char* kernel) const {
    for (const Region& region : regions_) {
      if (!region.output) continue;
      uint64_t written = 0;
      for (const Write& write : writes_) {
        if (write.begin >= region.data && write.end <= region.data + region.bytes) written += write.end - write.begin;
      }
      if (written != region.bytes) {
        throw Violation("kernel " + std::string(kernel) + ": " + std::to_string(written) + " of " +
                        std::to_string(region.bytes) + " bytes of an output were written");
      }
    }
  }

 private:
  struct Mapping {
    void* begin;
    uint64_t bytes;
  };
  struct Write {
    const uint8_t *begin, *end;
  };

  uint8_t* Map(uint64_t bytes, bool at_end, bool output) {
    const uint64_t page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
    const uint64_t size = (bytes / page + 1) * page;
    void* all = mmap(nullptr, size + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED) throw std::bad_alloc();
    mappings_.push_back({all, size + 2 * page});
    uint8_t* begin = static_cast<uint8_t*>(all) + page;
    if (mprotect(begin, size, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
    uint8_t* data = at_end ? begin + size - bytes : begin;
    regions_.push_back({data, bytes, output});
    return data;
  }

  std::vector<Mapping> mappings_;
  std::vector<Region> regions_;
  std::vector<Write> writes_;  // sorted, joined where they touch
};

}  // namespace sim
