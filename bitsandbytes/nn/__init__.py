"""Modules and parameters that hold quantised weights."""

from . import modules
from .modules import (
    Embedding,
    Embedding4bit,
    Embedding8bit,
    EmbeddingFP4,
    EmbeddingNF4,
    Int8Params,
    Linear4bit,
    Linear8bitLt,
    LinearFP4,
    LinearNF4,
    OutlierAwareLinear,
    Params4bit,
    StableEmbedding,
)

__all__ = [
    "Embedding",
    "Embedding4bit",
    "Embedding8bit",
    "EmbeddingFP4",
    "EmbeddingNF4",
    "Int8Params",
    "Linear4bit",
    "Linear8bitLt",
    "LinearFP4",
    "LinearNF4",
    "OutlierAwareLinear",
    "Params4bit",
    "StableEmbedding",
    "modules",
]
