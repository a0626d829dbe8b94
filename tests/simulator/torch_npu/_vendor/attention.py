"""Fused attention."""

from collections.abc import Iterator

import torch

from ._registry import FLOATS, LIBRARY, gradients, require, require_emulated, vendor_op

# How a layout of rank 4 becomes (batch, head, sequence, width) and, as the permutation is its own inverse, back.
_TRANSPOSED = {"BNSD": (0, 1, 2, 3), "BSND": (0, 2, 1, 3)}
# Layouts of rank 3 join heads and width; the batch comes first in the first.
_JOINED = {"BSH": (0, 1), "SBH": (1, 0)}
_LAYOUTS = (*_TRANSPOSED, *_JOINED, "TND")

_STATISTICS = 8  # the statistics of the softmax come eight times


def _split(x: torch.Tensor, layout: str, width: int) -> torch.Tensor:
    """(batch, head, sequence, width)"""
    if layout in _JOINED:
        return x.unflatten(-1, (-1, width)).permute(*_JOINED[layout], 2, 3).transpose(1, 2)
    return x.permute(_TRANSPOSED[layout])


def _join(x: torch.Tensor, layout: str) -> torch.Tensor:
    if layout in _JOINED:
        return x.transpose(1, 2).flatten(2).permute(*_JOINED[layout], 2)
    return x.permute(_TRANSPOSED[layout])


def _hidden(mask: torch.Tensor | None, mode: int, queries: int, keys: int, like: torch.Tensor) -> torch.Tensor | None:
    """True where a query does not see a key."""
    if mode in (0, 1):
        return None if mask is None else mask.bool()
    diagonal = 1 if mode == 2 else keys - queries + 1  # from the upper left, or to the lower right corner
    return torch.ones(queries, keys, dtype=torch.bool, device=like.device).triu(diagonal)


def _attention(q, k, v, hidden, scale):
    """The result and the softmax's maxima and sums of (batch, head, sequence, width)."""
    k, v = (x.float().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q.float() @ k.transpose(-1, -2) * scale
    if hidden is not None:
        scores = scores.masked_fill(hidden, torch.finfo(torch.float32).min)
    top = scores.amax(-1, keepdim=True)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    return (weights / total @ v).to(q.dtype), top, total


def _sequences(q, k, v, query_ends, key_ends) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """The parts of packed sequences (token, head, width), as batches of one."""
    for q_from, q_to, k_from, k_to in zip([0, *query_ends], query_ends, [0, *key_ends], key_ends, strict=False):
        yield tuple(x.transpose(0, 1)[None] for x in (q[q_from:q_to], k[k_from:k_to], v[k_from:k_to]))


def _forward(query, key, value, heads, layout, mask, scale, mode, query_ends, key_ends):
    if layout == "TND":
        parts = [
            _attention(q, k, v, _hidden(mask, mode, q.shape[2], k.shape[2], q), scale)
            for q, k, v in _sequences(query, key, value, query_ends, key_ends)
        ]
        return tuple(torch.cat([part[i][0].transpose(0, 1) for part in parts]) for i in range(3))
    width = query.shape[-1] // heads if layout in _JOINED else query.shape[-1]
    q, k, v = (_split(x, layout, width) for x in (query, key, value))
    result, top, total = _attention(q, k, v, _hidden(mask, mode, q.shape[2], k.shape[2], q), scale)
    return _join(result, layout).contiguous(), top, total


@vendor_op("npu_fusion_attention")
def npu_fusion_attention(
    query,
    key,
    value,
    head_num,
    input_layout,
    pse=None,
    padding_mask=None,
    atten_mask=None,
    scale=1.0,
    keep_prob=1.0,
    pre_tockens=2147483647,
    next_tockens=2147483647,
    inner_precise=0,
    prefix=None,
    actual_seq_qlen=None,
    actual_seq_kvlen=None,
    sparse_mode=0,
    gen_mask_parallel=True,
    sync=False,
    softmax_layout="",
    sink=None,
    dropout_mask=None,
    seed=0,
    offset=0,
):
    require(query.dtype in FLOATS, f"npu_fusion_attention: unsupported dtype {query.dtype}")
    require(query.dtype == key.dtype == value.dtype, "npu_fusion_attention: query, key and value differ in dtype")
    require(input_layout in _LAYOUTS, f"npu_fusion_attention: no input_layout '{input_layout}'")
    require(
        atten_mask is None or atten_mask.dtype in (torch.bool, torch.uint8),
        "npu_fusion_attention: atten_mask is bool or uint8, true where a query does not see a key",
    )
    require(
        sparse_mode not in (2, 3) or (atten_mask is not None and atten_mask.shape[-2:] == (2048, 2048)),
        "npu_fusion_attention: sparse_mode 2 and 3 take the atten_mask of 2048 x 2048 with an upper triangle",
    )
    require(
        input_layout != "TND" or (actual_seq_qlen is not None and actual_seq_kvlen is not None),
        "npu_fusion_attention: input_layout TND takes actual_seq_qlen and actual_seq_kvlen",
    )
    require_emulated(
        sparse_mode in (0, 1, 2, 3) and keep_prob == 1 and pse is padding_mask is prefix is sink is None,
        "npu_fusion_attention with dropout, pse, padding_mask, prefix, sink or sparse_mode above 3",
    )
    result, top, total = _forward(
        query,
        key,
        value,
        head_num,
        input_layout,
        atten_mask,
        scale,
        sparse_mode,
        actual_seq_qlen,
        actual_seq_kvlen,
    )
    statistics = (x.expand(*x.shape[:-1], _STATISTICS).contiguous() for x in (top, total))
    return result, *statistics, query.new_empty(0), 0, 0, 0


@vendor_op("npu_fusion_attention_grad")
def npu_fusion_attention_grad(
    query,
    key,
    value,
    dy,
    head_num,
    input_layout,
    *,
    atten_mask=None,
    scale_value=1.0,
    sparse_mode=0,
    actual_seq_qlen=None,
    actual_seq_kvlen=None,
    **_,
):
    def result(q, k, v):
        ends = actual_seq_qlen, actual_seq_kvlen
        return _forward(q, k, v, head_num, input_layout, atten_mask, scale_value, sparse_mode, *ends)[0]

    nothing = (query.new_empty(0), query.new_empty(0))
    return *gradients(result, [query, key, value], dy), *nothing


def _save(ctx, inputs, output):
    query, key, value, ctx.heads, ctx.layout, _, _, mask, scale = inputs[:9]
    ctx.save_for_backward(query, key, value)
    ctx.settings = {
        "atten_mask": mask,
        "scale_value": scale,
        "actual_seq_qlen": inputs[14],
        "actual_seq_kvlen": inputs[15],
        "sparse_mode": inputs[16],
    }
    ctx.mark_non_differentiable(*output[1:4])


def _gradient(ctx, gradient, *_):
    found = torch.ops.npu.npu_fusion_attention_grad(*ctx.saved_tensors, gradient, ctx.heads, ctx.layout, **ctx.settings)
    return *found[:3], *[None] * 21


torch.library.register_autograd("npu::npu_fusion_attention", _gradient, setup_context=_save, lib=LIBRARY)
