// Every check of the simulator is shown to fire on a small wrong kernel, and to be silent on the right one.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>

#include "check.h"
#include "kernel_operator.h"
#include "sim/device.h"

namespace {

using namespace AscendC;

constexpr uint32_t kCount = 1024;  // floats of the input and of the output
using Floats = LocalTensor<float>;
const DataCopyPadExtParams<float> kNoPad{false, 0, 0, 0};

DataCopyExtParams Row(int64_t count) { return {1, count * 4, 0, 0, 0}; }

// What a kernel has at hand.
struct Context {
  Context(GM_ADDR in_address, GM_ADDR out_address) : in_address(in_address), out_address(out_address) {
    in.SetGlobalBuffer(reinterpret_cast<float*>(in_address), kCount);
    out.SetGlobalBuffer(reinterpret_cast<float*>(out_address), kCount);
    pipe.InitBuffer(queue, 2, kCount * 4);
    pipe.InitBuffer(results, 2, kCount * 4);
    pipe.InitBuffer(buffer, kCount * 4);
    pipe.InitBuffer(other, kCount * 4);
    a = buffer.Get<float>();
    b = other.Get<float>();
  }
  void Fill() {  // a and b, by V
    Duplicate(a, 1.0f, kCount);
    Duplicate(b, 1.0f, kCount);
    PipeBarrier<PIPE_V>();
  }
  void CopyIn() {
    Floats tensor = queue.AllocTensor<float>();
    DataCopyPad(tensor, in, Row(kCount), kNoPad);
    queue.EnQue(tensor);
  }
  void CopyOut() {
    Floats tensor = results.DeQue<float>();
    DataCopyPad(out, tensor, Row(kCount));
    results.FreeTensor(tensor);
  }

  GM_ADDR in_address, out_address;
  TPipe pipe;
  GlobalTensor<float> in, out;
  TQue<TPosition::VECIN, 2> queue;
  TQue<TPosition::VECOUT, 2> results;
  TBuf<TPosition::VECCALC> buffer, other;
  Floats a, b;
};
using C = Context&;

// out = in + 1
void Right(C c) {
  c.CopyIn();
  Floats x = c.queue.DeQue<float>(), y = c.results.AllocTensor<float>();
  Adds(y, x, 1.0f, kCount);
  c.queue.FreeTensor(x);
  c.results.EnQue(y);
  c.CopyOut();
}

struct Wrong {
  const char* report;  // a part of what it says
  std::function<void(C)> kernel;
};

const Wrong kWrong[] = {
    // GM: bounds, and what may be written.
    {"no live argument", [](C c) { c.in.SetGlobalBuffer(reinterpret_cast<float*>(c.in_address), kCount + 1); }},
    {"no live argument", [](C c) { c.in.SetGlobalBuffer(reinterpret_cast<float*>(c.in_address) - 1, kCount); }},
    {"not aligned to its elements", [](C c) { c.in.SetGlobalBuffer(reinterpret_cast<float*>(c.in_address + 1), 8); }},
    {"1024 elements from 0 on, of 1023",
     [](C c) { DataCopyPad(c.queue.AllocTensor<float>(), c.in[1], Row(kCount), kNoPad); }},
    {"GlobalTensor::GetValue", [](C c) { c.in.GetValue(kCount); }},
    {"element 1025 of 1024", [](C c) { c.in[kCount + 1]; }},
    {"not an output",
     [](C c) {
       c.CopyIn();
       Floats x = c.queue.DeQue<float>();
       PipeBarrier<PIPE_ALL>();
       DataCopyPad(c.in, x, Row(8));
     }},
    {"written before", [](C c) { Right(c), Right(c); }},

    // UB: budget, bounds, alignment, what was never written.
    {"the rest is reserved",
     [](C c) {
       TBuf<TPosition::VECCALC> large;
       c.pipe.InitBuffer(large, 192 * 1024 - sim::kReserved - 6 * kCount * 4 + 1);
     }},
    {"more than 64 buffers",
     [](C c) {
       TBuf<TPosition::VECCALC> small[59];
       for (auto& buffer : small) c.pipe.InitBuffer(buffer, 32);
     }},
    {"bytes from 0 on, of the 4096", [](C c) { Duplicate(c.a, 1.0f, kCount + 1); }},
    {"lies outside the tensor", [](C c) { c.a[kCount + 1]; }},
    {"not aligned to 32 B", [](C c) { Duplicate(c.a[1], 1.0f, 8); }},
    {"not aligned to 32 B", [](C c) { DataCopyPad(c.queue.AllocTensor<float>()[1], c.in, Row(8), kNoPad); }},
    {"was never written", [](C c) { Adds(c.a, c.a, 1.0f, 8); }},
    {"was never written",  // the tail of a data block that nothing fills
     [](C c) {
       Floats x = c.queue.AllocTensor<float>();
       DataCopyPad(x, c.in, Row(7), kNoPad);
       PipeBarrier<PIPE_ALL>();
       Adds(c.a, x, 1.0f, 8);
     }},
    {"was never written",  // what the buffer held for its owner before
     [](C c) {
       for (int i = 0; i < 2; ++i) c.CopyIn();
       for (int i = 0; i < 2; ++i) c.queue.FreeTensor(c.queue.DeQue<float>());
       Adds(c.a, c.queue.AllocTensor<float>(), 1.0f, 8);
     }},

    // Counts, types and widths of fields.
    {"no round mode",
     [](C c) {
       c.Fill();
       Cast(c.a.ReinterpretCast<bfloat16_t>(), c.b, RoundMode::CAST_NONE, 8);
     }},
    {"odd number of int4b_t",
     [](C c) {
       c.Fill();
       Cast(c.a.ReinterpretCast<half>(), c.b.ReinterpretCast<int4b_t>(), RoundMode::CAST_NONE, 7);
     }},
    {"no multiple of 256 B",
     [](C c) {
       c.Fill();
       CompareScalar(c.a.ReinterpretCast<uint8_t>(), c.b, 0.0f, CMPMODE::GT, 96);
     }},
    {"blockLen", [](C) { DataCopyExtParams(1, 2097152, 0, 0, 0); }},
    {"blockCount", [](C) { DataCopyExtParams(4096, 32, 0, 0, 0); }},
    {"rightPadding", [](C) { DataCopyPadExtParams<float>(true, 0, 9, 0); }},
    {"beyond the last data block",
     [](C c) { DataCopyPad(c.queue.AllocTensor<float>(), c.in, Row(7), DataCopyPadExtParams<float>{true, 0, 2, 0}); }},
    {"cuts an element",
     [](C c) { DataCopyPad(c.queue.AllocTensor<float>(), c.in, DataCopyExtParams{1, 30, 0, 0, 0}, kNoPad); }},
    {"src1RepStride", [](C) { BinaryRepeatParams(1, 1, 1, 8, 8, 256); }},
    {"repeatTime",
     [](C c) {
       c.Fill();
       Add(c.a, c.a, c.b, uint64_t{64}, 256, BinaryRepeatParams{1, 1, 1, 0, 0, 0});
     }},
    {"mask",
     [](C c) {
       c.Fill();
       Add(c.a, c.a, c.b, uint64_t{65}, 1, BinaryRepeatParams{1, 1, 1, 8, 8, 8});
     }},
    {"a shift by 17 bits",
     [](C c) {
       c.Fill();
       ShiftLeft(c.a.ReinterpretCast<uint16_t>(), c.b.ReinterpretCast<uint16_t>(), uint16_t{17}, 8);
     }},
    {"VSEL_TENSOR_SCALAR_MODE",
     [](C c) {
       c.Fill();
       Select(c.a, c.b.ReinterpretCast<uint8_t>(), c.a, 1.0f, SELMODE::VSEL_TENSOR_TENSOR_MODE, 8);
     }},
    {"is a VECIN or VECOUT", [](C c) { DataCopyPad(c.a, c.in, Row(8), kNoPad); }},

    // Overlap, and the offsets of Gather.
    {"overlap",
     [](C c) {
       c.Fill();
       Adds(c.a[8], c.a, 1.0f, 16);
     }},
    {"overlap",  // of one width it would be allowed
     [](C c) {
       c.Fill();
       Cast(c.a.ReinterpretCast<bfloat16_t>(), c.a, RoundMode::CAST_RINT, 16);
     }},
    {"overlap",
     [](C c) {
       c.Fill();
       Add(c.a[8], c.a, c.b, uint64_t{64}, 2, BinaryRepeatParams{1, 1, 1, 8, 8, 8});
     }},
    {"overlap",
     [](C c) {
       Duplicate(c.b.ReinterpretCast<uint32_t>(), uint32_t{0}, 8);
       Duplicate(c.a, 1.0f, 8);
       PipeBarrier<PIPE_V>();
       Gather(c.a, c.a, c.b.ReinterpretCast<uint32_t>(), 0, 8);
     }},
    {"cuts an element",
     [](C c) {
       Duplicate(c.b.ReinterpretCast<uint32_t>(), uint32_t{2}, 8);
       Duplicate(c.a[8], 1.0f, 8);
       PipeBarrier<PIPE_V>();
       Gather(c.queue.AllocTensor<float>(), c.a, c.b.ReinterpretCast<uint32_t>(), 0, 8);
     }},
    {"bytes from 4096 on",
     [](C c) {
       Duplicate(c.b.ReinterpretCast<uint32_t>(), kCount * 4, 8);
       PipeBarrier<PIPE_V>();
       Gather(c.queue.AllocTensor<float>(), c.a, c.b.ReinterpretCast<uint32_t>(), 0, 8);
     }},

    // Queues.
    {"no buffer of the queue is free",
     [](C c) {
       for (int i = 0; i < 3; ++i) c.queue.AllocTensor<float>();
     }},
    {"is in its queue",
     [](C c) {
       Floats x = c.queue.AllocTensor<float>();
       c.queue.EnQue(x);
       c.queue.EnQue(x);
     }},
    {"than its depth, 1",
     [](C c) {
       TQue<TPosition::VECIN, 1> shallow;
       c.pipe.InitBuffer(shallow, 2, 32);
       for (int i = 0; i < 2; ++i) shallow.EnQue(shallow.AllocTensor<float>());
     }},
    {"the queue is empty", [](C c) { c.queue.DeQue<float>(); }},
    {"was not dequeued", [](C c) { c.queue.FreeTensor(c.queue.AllocTensor<float>()); }},
    {"another queue's", [](C c) { c.results.EnQue(c.queue.AllocTensor<float>()); }},
    {"DeQue comes first",
     [](C c) {
       Floats x = c.results.AllocTensor<float>();
       c.results.EnQue(x);
       Duplicate(x, 1.0f, 8);
     }},
    {"was freed",
     [](C c) {
       c.CopyIn();
       Floats x = c.queue.DeQue<float>();
       c.queue.FreeTensor(x);
       Adds(c.a, x, 1.0f, 8);
     }},
    {"was freed",  // and given to the next
     [](C c) {
       c.CopyIn();
       Floats x = c.queue.DeQue<float>();
       c.queue.FreeTensor(x);
       for (int i = 0; i < 2; ++i) c.queue.AllocTensor<float>();
       Adds(c.a, x, 1.0f, 8);
     }},
    {"was not freed",
     [](C c) {
       Right(c);
       c.CopyIn();
     }},
    {"the tensor has no buffer", [](C) { Duplicate(Floats(), 1.0f, 8); }},

    // Order between pipes, and within one.
    {"read by V without waiting until MTE2 has written it",
     [](C c) {
       Floats x = c.queue.AllocTensor<float>();
       DataCopyPad(x, c.in, Row(kCount), kNoPad);
       Adds(c.a, x, 1.0f, 8);
     }},
    {"written by MTE2 without waiting until V has read it",
     [](C c) {
       c.CopyIn();
       Floats x = c.queue.DeQue<float>();
       Adds(c.a, x, 1.0f, 8);
       PipeBarrier<PIPE_MTE2>();
       DataCopyPad(x, c.in, Row(kCount), kNoPad);
     }},
    {"read by MTE3 without waiting until V has written it",
     [](C c) {
       Floats y = c.results.AllocTensor<float>();
       Duplicate(y, 1.0f, kCount);
       DataCopyPad(c.out, y, Row(kCount));
     }},
    {"written by V without waiting until MTE3 has read it",
     [](C c) {
       Floats y = c.results.AllocTensor<float>();
       Duplicate(y, 1.0f, kCount);
       c.results.EnQue(y);
       y = c.results.DeQue<float>();
       DataCopyPad(c.out, y, Row(kCount));
       PipeBarrier<PIPE_V>();
       Duplicate(y, 1.0f, 8);
     }},
    {"read by V without waiting until V has written it",
     [](C c) {
       Duplicate(c.a, 1.0f, 8);
       Adds(c.b, c.a, 1.0f, 8);
     }},
    {"written by V without waiting until V has written it",
     [](C c) {
       Duplicate(c.a, 1.0f, 8);
       Duplicate(c.a, 1.0f, 8);
     }},
    {"written by V without waiting until V has read it",
     [](C c) {
       c.Fill();
       Adds(c.a, c.b, 1.0f, 8);
       Duplicate(c.b, 1.0f, 8);
     }},
    {"read by V without waiting until S has written it",
     [](C c) {
       for (int i = 0; i < 8; ++i) c.a.SetValue(i, 1.0f);
       Adds(c.b, c.a, 1.0f, 8);
     }},
    {"read by S without waiting until V has written it",
     [](C c) {
       Duplicate(c.a, 1.0f, 8);
       c.a.GetValue(0);
     }},
    {"was not set: the core hangs", [](C) { WaitFlag<HardEvent::V_S>(0); }},
    {"is set twice",
     [](C) {
       SetFlag<HardEvent::V_S>(0);
       SetFlag<HardEvent::V_S>(0);
     }},
    {"is still set",
     [](C c) {
       Right(c);
       SetFlag<HardEvent::V_S>(0);
     }},
    {"6 and 7 reserved", [](C) { SetFlag<HardEvent::V_S>(6); }},

    // The whole output.
    {"0 of 4096 bytes of an output", [](C) {}},
};

const char* Run(const std::function<void(C)>& kernel, uint32_t blocks, std::string* text, bool free_early = false) {
  sim::Device device(sim::kAscend910B3);
  const std::vector<float> values(kCount, 2.0f);
  uint8_t* in = device.memory().Input(values.data(), kCount * 4);
  uint8_t* out = device.memory().Output(kCount * 4);
  device.Launch("test", blocks, [=] {
    Context context(in, out);
    kernel(context);
  });
  if (free_early) device.memory().Free(in);
  try {
    device.Synchronise();
  } catch (const sim::Violation& violation) {
    *text = violation.what();
    return text->c_str();
  }
  for (uint32_t i = 0; i < kCount; ++i) CHECK(reinterpret_cast<float*>(out)[i] == 3.0f);
  return nullptr;
}

// A pointer used without a GlobalTensor meets the inaccessible page.
bool Faults(int64_t offset, bool at_end) {
  const pid_t child = fork();
  if (child == 0) {
    signal(SIGSEGV, SIG_DFL);  // a sanitizer would report it and exit
    sim::Memory memory;
    const float values[5] = {};
    volatile const float* data = reinterpret_cast<float*>(memory.Input(values, sizeof(values), at_end));
    static_cast<void>(data[offset]);
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFSIGNALED(status);
}

}  // namespace

int main() {
  std::string text;
  CHECK(Run(Right, 1, &text) == nullptr);
  int failed = 0;
  for (const Wrong& wrong : kWrong) {
    const char* report = Run(wrong.kernel, 1, &text);
    if (report != nullptr && text.find(wrong.report) != std::string::npos) continue;
    fprintf(stderr, "expected '%s', got: %s\n", wrong.report, report != nullptr ? report : "nothing");
    ++failed;
  }
  CHECK(failed == 0);
  // Where it happened.
  Run([](C c) { Duplicate(c.a[1], 1.0f, 8); }, 1, &text);
  CHECK(text.find("kernel test, block 0 of 1, call 1 (Duplicate): UB 0x4004") == 0);

  CHECK(Run(Right, 2, &text) != nullptr && text.find("block 1 of 2") != std::string::npos);  // two blocks, one output
  CHECK(Run(Right, 1, &text, true) != nullptr && text.find("no live argument") != std::string::npos);
  CHECK(Run(Right, 0, &text) != nullptr && text.find("numBlocks") != std::string::npos);
  CHECK(Faults(5, true) && Faults(-1, false) && !Faults(4, true));
  return 0;
}
