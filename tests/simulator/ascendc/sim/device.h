// Launches on the simulated chip, and what comes back.
#pragma once

#include <functional>

#include "tensor.h"

namespace sim {

struct Report {
  double cycles = 0;                  // modelled: of the slowest core, and no less than the HBM takes for all bytes
  double bound = 0;                   // cycles that the HBM takes for the bytes of the arguments that were moved
  std::array<double, kPipes> busy{};  // share of its time that each pipe of the slowest core works
  uint64_t bytes = 0;
};

// As on a chip, a launch only notes the call: the kernel runs when the device is synchronised, with the arguments that
// were passed by value and whatever the pointers point to by then.
class Device {
 public:
  explicit Device(const Chip& chip) : chip_(chip) {}

  Memory& memory() { return memory_; }

  void Launch(const char* kernel, uint32_t blocks, std::function<void()> body) {
    pending_ = {kernel, blocks, std::move(body)};
  }

  // Runs the blocks of the kernel one after the other. `only` runs a single one, for its time.
  Report Synchronise(int64_t only = -1) {
    Report report;
    if (pending_.blocks == 0 || pending_.blocks > 65535) throw Violation("numBlocks is not in [1, 65535]");
    for (uint32_t block = 0; block < pending_.blocks; ++block) {
      if (only >= 0 && block != only) continue;
      Core core(chip_, &memory_, pending_.kernel, block, pending_.blocks);
      const Running running(&core);
      pending_.body();
      core.Finish();
      report.bytes += core.gm_bytes();
      if (core.Cycles() < report.cycles) continue;
      report.cycles = core.Cycles();
      for (int pipe = 0; pipe < kPipes; ++pipe) report.busy[pipe] = core.busy()[pipe] / core.Cycles();
    }
    const double share = only >= 0 ? 1.0 / pending_.blocks : 1.0;
    report.bound = static_cast<double>(report.bytes) * chip_.hertz / (chip_.hbm * share);
    if (report.cycles < report.bound) report.cycles = report.bound;
    if (only < 0) memory_.CheckComplete(pending_.kernel);
    return report;
  }

 private:
  struct Running {
    explicit Running(Core* core) { Core::Current() = core; }
    ~Running() { Core::Current() = nullptr; }
  };
  struct Pending {
    const char* kernel = "";
    uint32_t blocks = 0;
    std::function<void()> body;
  };
  const Chip chip_;
  Memory memory_;
  Pending pending_;
};

}  // namespace sim
