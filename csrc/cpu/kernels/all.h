// The kernels of one target; the only content of each file in targets/, which defines BNB_TARGET.
#pragma once

// Headers for all targets at once, before any target's instructions are in effect.
#include "cpu/kernels.h"
#include "cpu/kernels/blockwise.h"
#include "cpu/kernels/fourbit.h"
#include "cpu/kernels/gemm4.h"
#include "cpu/kernels/int8_matmul.h"
#include "cpu/kernels/int8_rows.h"

namespace bnb {

extern const Kernels BNB_TARGET;
const Kernels BNB_TARGET = {
    HWY_STR(BNB_TARGET),  //
    Quantize4,            //
    Dequantize4,          //
    Gemm4,                //
    DecodeRows4,          //
    QuantizeBlockwise,    //
    DequantizeBlockwise,  //
    QuantizeRows8,        //
    DequantizeRows8,      //
    Multiply8,            //
    DequantizeProduct8,   //
    ScaledMultiply8,
};

}  // namespace bnb
