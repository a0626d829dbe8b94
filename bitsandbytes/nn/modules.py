"""All modules and parameters under the path that other packages import and patch."""

import bitsandbytes as bnb

from .embedding import Embedding, Embedding4bit, Embedding8bit, EmbeddingFP4, EmbeddingNF4, StableEmbedding
from .linear4bit import Linear4bit, LinearFP4, LinearNF4, Params4bit, fix_4bit_weight_quant_state_from_module, logger
from .linear8bit import Int8Params, Linear8bitLt, maybe_rearrange_weight
from .outlier import OutlierAwareLinear
from ..functional import QuantState, has_avx512bf16
from ..optim import GlobalOptimManager
from ..utils import INVERSE_LINEAR_8BIT_WEIGHTS_FORMAT_MAPPING, OutlierTracer

__all__ = [
    "INVERSE_LINEAR_8BIT_WEIGHTS_FORMAT_MAPPING",
    "Embedding",
    "Embedding4bit",
    "Embedding8bit",
    "EmbeddingFP4",
    "EmbeddingNF4",
    "GlobalOptimManager",
    "Int8Params",
    "Linear4bit",
    "Linear8bitLt",
    "LinearFP4",
    "LinearNF4",
    "OutlierAwareLinear",
    "OutlierTracer",
    "Params4bit",
    "QuantState",
    "StableEmbedding",
    "bnb",
    "fix_4bit_weight_quant_state_from_module",
    "has_avx512bf16",
    "logger",
    "maybe_rearrange_weight",
]
