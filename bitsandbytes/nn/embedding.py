"""Embeddings: with 32-bit optimizer state, and with 4-bit or int8 tables whose lookup decodes the asked rows alone."""

import torch
from torch import nn

import bitsandbytes as bnb

from .linear4bit import Params4bit, Quantized4bitModule, logger
from .linear8bit import Int8Params, QuantizedInt8Module
from ..errors import NotQuantizedError
from ..formats import NESTED_BLOCKSIZE
from ..optim import GlobalOptimManager


class Embedding(nn.Embedding):
    """`torch.nn.Embedding`, Xavier-initialised, whose weight keeps 32-bit optimizer state."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: torch.Tensor | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(
            num_embeddings,
            embedding_dim,
            padding_idx,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            sparse,
            _weight,
            device=device,
        )
        GlobalOptimManager.get_instance().register_module_override(self, "weight", {"optim_bits": 32})

    def reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.weight)
        self._fill_padding_idx_with_zero()


class StableEmbedding(Embedding):
    """`Embedding` followed by a layer norm in full precision (8-bit optimizers, arXiv:2110.02861, section 2.3)."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: torch.Tensor | None = None,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__(
            num_embeddings,
            embedding_dim,
            padding_idx,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            sparse,
            _weight,
            device=device,
        )
        if dtype is not None:
            self.weight.data = self.weight.data.to(dtype)
        self.norm = nn.LayerNorm(embedding_dim, device=device)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = super().forward(input).to(self.norm.weight.dtype)
        return self.norm(rows).to(self.weight.dtype)


class Embedding8bit(QuantizedInt8Module, nn.Embedding):
    """An embedding with an int8 table, quantised by row when the layer is moved to a device.

    Args:
        num_embeddings, embedding_dim, device, padding_idx: As for `torch.nn.Embedding`.
        dtype: dtype of the results.
    """

    def __init__(self, num_embeddings, embedding_dim, device=None, dtype=None, padding_idx=None):
        super().__init__(num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype)
        self.dtype = self.weight.dtype
        self.weight = Int8Params(self.weight.data, has_fp16_weights=False, requires_grad=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Rows `input` (integers of any shape), decoded: (*input.shape, embedding_dim)."""
        if self.weight.dtype != torch.int8 or self.weight.SCB is None:
            raise NotQuantizedError("Embedding8bit: the table is not quantised yet; move the layer to a device first")

        return torch.ops.bitsandbytes.int8_embedding(input, self.weight.data, self.weight.SCB, self.dtype)


class Embedding4bit(Quantized4bitModule, nn.Embedding):
    """An embedding with a 4-bit table, quantised when the layer is moved to a device.

    Args:
        num_embeddings, embedding_dim, device, padding_idx: As for `torch.nn.Embedding`. Any width works; one that is a
            multiple of the block size (64) is looked up faster.
        dtype: dtype of the results.
        quant_type, quant_storage: As for `Params4bit`.
    """

    def __init__(
        self,
        num_embeddings,
        embedding_dim,
        dtype=None,
        quant_type="fp4",
        quant_storage=torch.uint8,
        device=None,
        padding_idx=None,
    ):
        super().__init__(num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype)
        self.dtype = self.weight.dtype
        self.weight = Params4bit(
            self.weight.data,
            requires_grad=False,
            compress_statistics=False,
            quant_type=quant_type,
            quant_storage=quant_storage,
            module=self,
        )
        self.quant_state = None
        if embedding_dim % self.weight.blocksize:
            logger.warning(
                "Embedding4bit: width %d is no multiple of the block size %d: rows share blocks, and every lookup in "
                "training or inference decodes one more block a row.",
                embedding_dim,
                self.weight.blocksize,
            )

    def _weight_shape(self) -> tuple[int, int]:
        return self.num_embeddings, self.embedding_dim

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Rows `input` (integers of any shape), decoded: (*input.shape, embedding_dim)."""
        bnb.nn.modules.fix_4bit_weight_quant_state_from_module(self)
        state = self.weight.quant_state
        shape, kind = (self.num_embeddings, self.embedding_dim), (state.blocksize, state.quant_type, self.dtype)
        look_up = torch.ops.bitsandbytes.embedding_4bit
        state2 = state.state2
        if state.nested and state2.blocksize == NESTED_BLOCKSIZE:
            nested = state.absmax, state2.code, state.offset
            return look_up(input, self.weight.data, shape, state2.absmax, *kind, *nested)
        return look_up(input, self.weight.data, shape, bnb.functional.blockwise.decoded_absmax(state), *kind)


class EmbeddingFP4(Embedding4bit):
    """`Embedding4bit` with FP4."""

    def __init__(
        self,
        num_embeddings,
        embedding_dim,
        dtype=None,
        quant_storage=torch.uint8,
        device=None,
        padding_idx=None,
    ):
        super().__init__(num_embeddings, embedding_dim, dtype, "fp4", quant_storage, device, padding_idx)


class EmbeddingNF4(Embedding4bit):
    """`Embedding4bit` with NF4."""

    def __init__(
        self,
        num_embeddings,
        embedding_dim,
        dtype=None,
        quant_storage=torch.uint8,
        device=None,
        padding_idx=None,
    ):
        super().__init__(num_embeddings, embedding_dim, dtype, "nf4", quant_storage, device, padding_idx)
