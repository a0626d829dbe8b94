"""What users call: quantisation and its inverse, int8 matmuls, optimizer updates, maps."""

from .blockwise import dequantize_blockwise, quantize_blockwise
from .fourbit import (
    dequantize_4bit,
    dequantize_fp4,
    dequantize_nf4,
    gemv_4bit,
    quantize_4bit,
    quantize_fp4,
    quantize_nf4,
)
from .int8 import (
    int8_double_quant,
    int8_linear_matmul,
    int8_mm_dequant,
    int8_vectorwise_dequant,
    int8_vectorwise_quant,
)
from .maps import (
    create_dynamic_map,
    create_fp8_map,
    create_linear_map,
    create_normal_map,
    get_4bit_type,
    name2qmap,
)
from .memory import (
    FIRST_CUDA_DEVICE,
    GlobalPageManager,
    elementwise_func,
    fill,
    get_paged,
    get_ptr,
    is_on_gpu,
    prefetch_tensor,
)
from .optim import optimizer_update_8bit_blockwise, optimizer_update_32bit
from ..cextension import lib
from ..formats import INT8_MAX
from ..quant_state import QuantState, pack_dict_to_tensor, unpack_tensor_to_dict

C = float(INT8_MAX)


def has_avx512bf16() -> bool:
    """False: there is no packed CPU weight layout here that callers would have to undo."""
    return False


__all__ = [
    "FIRST_CUDA_DEVICE",
    "C",
    "GlobalPageManager",
    "QuantState",
    "create_dynamic_map",
    "create_fp8_map",
    "create_linear_map",
    "create_normal_map",
    "dequantize_4bit",
    "dequantize_blockwise",
    "dequantize_fp4",
    "dequantize_nf4",
    "elementwise_func",
    "fill",
    "gemv_4bit",
    "get_4bit_type",
    "get_paged",
    "get_ptr",
    "has_avx512bf16",
    "int8_double_quant",
    "int8_linear_matmul",
    "int8_mm_dequant",
    "int8_vectorwise_dequant",
    "int8_vectorwise_quant",
    "is_on_gpu",
    "lib",
    "name2qmap",
    "optimizer_update_8bit_blockwise",
    "optimizer_update_32bit",
    "pack_dict_to_tensor",
    "prefetch_tensor",
    "quantize_4bit",
    "quantize_blockwise",
    "quantize_fp4",
    "quantize_nf4",
    "unpack_tensor_to_dict",
]
