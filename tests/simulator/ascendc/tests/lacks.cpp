// Each case is one call that A2 has not (its documentation gives the types, call by call); case 0 is some that it has.
#include "kernel_operator.h"

using namespace AscendC;

template <typename T>
LocalTensor<T> t;

void Call() {
#if CASE == 0
  Add(t<half>, t<half>, t<half>, 8);
  Muls(t<float>, t<float>, 2.0f, 8);
  And(t<uint16_t>, t<uint16_t>, t<uint16_t>, 8);
  ShiftLeft(t<uint16_t>, t<uint16_t>, uint16_t{4}, 8);
  Cast(t<bfloat16_t>, t<float>, RoundMode::CAST_RINT, 8);
  Gather(t<bfloat16_t>, t<bfloat16_t>, t<uint32_t>, 0, 8);
#elif CASE == 1   // no arithmetic on bf16
  Add(t<bfloat16_t>, t<bfloat16_t>, t<bfloat16_t>, 8);
#elif CASE == 2   // the type of the scalar is that of the elements
  Muls(t<float>, t<float>, 2, 8);
#elif CASE == 3   // compiles on a chip and processes half of the data
  And(t<uint32_t>, t<uint32_t>, t<uint32_t>, 8);
#elif CASE == 4   // no 8-bit shifts
  ShiftRight(t<uint8_t>, t<uint8_t>, uint8_t{4}, 8);
#elif CASE == 5   // no Cast from 8 bits to fp32
  Cast(t<float>, t<uint8_t>, RoundMode::CAST_NONE, 8);
#elif CASE == 6   // nor between the 16-bit floats
  Cast(t<bfloat16_t>, t<half>, RoundMode::CAST_RINT, 8);
#elif CASE == 7   // compiles on a chip and does nothing
  Gather(t<uint8_t>, t<uint8_t>, t<uint32_t>, 0, 8);
#elif CASE == 8   // no Duplicate of 8 bits
  Duplicate(t<uint8_t>, uint8_t{1}, 8);
#elif CASE == 9   // And with a scalar is of a later chip
  Ands(t<uint16_t>, t<uint16_t>, uint16_t{15}, 8);
#elif CASE == 10  // no Select of integers
  Select(t<int32_t>, t<uint8_t>, t<int32_t>, t<int32_t>, SELMODE::VSEL_TENSOR_TENSOR_MODE, 8);
#elif CASE == 11  // no Div of integers
  Div(t<int32_t>, t<int32_t>, t<int32_t>, 8);
#endif
}
