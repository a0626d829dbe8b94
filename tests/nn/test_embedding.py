"""Embeddings: lookups equal the decoded table, stay small, and save and load like the Linear layers."""

import copy
import io

import pytest
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bitsandbytes import functional as F
from bitsandbytes.errors import NotQuantizedError
from bitsandbytes.nn import (
    Embedding,
    Embedding4bit,
    Embedding8bit,
    EmbeddingFP4,
    EmbeddingNF4,
    Int8Params,
    Linear4bit,
    Params4bit,
    StableEmbedding,
)
from bitsandbytes.optim import Adam8bit

from .helpers import FLOATS, STORAGES, assert_same_tensors, decoded, randn, same_bits, snapshot, tensors_of_parameter

ROWS = 50
CLASSES = {
    "nf4": lambda rows, width, **kwargs: EmbeddingNF4(rows, width, **kwargs),
    "fp4": lambda rows, width, **kwargs: EmbeddingFP4(rows, width, **kwargs),
    "int8": lambda rows, width, **kwargs: Embedding8bit(rows, width, **kwargs),
}
every_class = pytest.mark.parametrize("make", CLASSES.values(), ids=CLASSES)


def table(make, width=100, rows=ROWS, seed=0, dtype=torch.float32, **kwargs):
    layer = make(rows, width, dtype=dtype, **kwargs)
    layer.weight.data = randn(rows, width, seed=seed, dtype=dtype)
    return layer.to("cpu")


def full(layer):
    """The whole table, decoded by the public functions."""
    weight = layer.weight
    if isinstance(weight, Params4bit):
        return decoded(weight)
    return F.int8_vectorwise_dequant(weight.data, weight.SCB).to(layer.dtype)


# Lookups


# Smaller and larger than a block of 64, multiples of it, even and odd, prime, and one whose rows share bytes.
@pytest.mark.parametrize("width", [1, 2, 7, 31, 32, 33, 63, 64, 65, 97, 100, 127, 128, 130, 192, 1000])
@every_class
def test_a_lookup_is_a_row_of_the_decoded_table(make, width):
    layer = table(make, width)
    ids = torch.tensor([[0, 1, ROWS - 1], [7, 7, 25]])
    assert same_bits(layer(ids), full(layer)[ids])
    everything = torch.arange(ROWS)
    assert same_bits(layer(everything), full(layer))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@every_class
def test_the_dtype_is_that_of_the_table(make, dtype):
    layer = table(make, dtype=dtype)
    ids = torch.tensor([3, 1])
    assert layer(ids).dtype == dtype and same_bits(layer(ids), full(layer)[ids])


@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.parametrize("width", [33, 128])
def test_every_storage(storage, width):
    layer = table(CLASSES["nf4"], width, rows=64, quant_storage=storage)
    assert layer.weight.dtype == storage
    ids = torch.tensor([63, 0, 5])
    assert same_bits(layer(ids), full(layer)[ids])


@pytest.mark.parametrize("width", [33, 64, 100])
@pytest.mark.parametrize("blocksize", [64, 256])
def test_nested_statistics(width, blocksize):
    layer = EmbeddingNF4(700, width)
    layer.weight = Params4bit(
        randn(700, width), quant_type="nf4", compress_statistics=True, blocksize=blocksize, module=layer
    )
    layer.to("cpu")
    assert layer.weight.quant_state.nested
    ids = torch.tensor([0, 699, 350, 1])
    assert same_bits(layer(ids), full(layer)[ids])


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3, 4)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@every_class
def test_indices_of_any_shape_and_integer_dtype(make, shape, dtype):
    layer = table(make)
    ids = torch.arange(torch.Size(shape).numel(), dtype=dtype).reshape(shape)
    assert layer(ids).shape == (*shape, 100)
    assert same_bits(layer(ids), full(layer)[ids.long()])


def test_strided_indices():
    layer = table(CLASSES["nf4"])
    ids = torch.arange(24).view(4, 6).t()
    assert same_bits(layer(ids), full(layer)[ids])


@pytest.mark.parametrize("index", [ROWS, -1, 2**40])
@pytest.mark.parametrize("width", [64, 100])
@every_class
def test_indices_outside_the_table_raise(make, width, index):
    with pytest.raises((IndexError, RuntimeError), match=r"(?i)range|bound"):
        table(make, width)(torch.tensor([0, index]))


@pytest.mark.parametrize("padding_idx", [0, 3, -1])
@every_class
def test_padding_idx_is_kept(make, padding_idx):
    layer = make(ROWS, 100, padding_idx=padding_idx).to("cpu")
    row = padding_idx % ROWS
    assert layer.padding_idx == row
    values = layer(torch.tensor([row, (row + 1) % ROWS]))
    assert values[0].count_nonzero() == 0 and values[1].count_nonzero() > 0  # as torch.nn.Embedding initialises it


@every_class
def test_a_table_that_was_never_moved_says_so(make):
    with pytest.raises(NotQuantizedError, match="Embedding"):
        make(ROWS, 64)(torch.tensor([0]))


class LargestTensor(TorchDispatchMode):
    """Records the size of the largest tensor that any operator makes."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self.bytes = max(self.bytes, value.untyped_storage().nbytes() if value._base is None else 0)
        return result


@pytest.mark.parametrize("width", [64, 100])
@every_class
def test_a_lookup_decodes_no_more_than_the_rows_asked_for(make, width):
    rows = 20_000
    layer = table(make, width, rows=rows)
    allowed = {layer.weight.untyped_storage().nbytes()}  # views of the table itself
    with LargestTensor() as largest:
        layer(torch.tensor([1, 19_999, 500]))
    assert largest.bytes in allowed or largest.bytes < 64 * 1024
    with LargestTensor() as decode:
        full(layer)
    assert decode.bytes >= rows * width  # the measure sees a decoded table


# Saving and loading


def expected_keys(layer):
    if isinstance(layer, Embedding8bit):
        return {"weight", "SCB", "weight_format"}
    kind = layer.weight.quant_type
    return {"weight", "weight.absmax", "weight.quant_map", f"weight.quant_state.bitsandbytes__{kind}"}


@pytest.mark.parametrize("target_is_quantized", [False, True])
@pytest.mark.parametrize("width", [64, 100])
@every_class
def test_save_and_load(make, width, target_is_quantized):
    source = table(make, width)
    state = source.state_dict()
    assert state.keys() == expected_keys(source) and {type(v) for v in state.values()} == {torch.Tensor}
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    for loaded in (torch.load(buffer, weights_only=True), load_safetensors(save_safetensors(dict(state)))):
        target = table(make, width, seed=7) if target_is_quantized else make(ROWS, width)
        target.load_state_dict(loaded, strict=True)
        ids = torch.arange(ROWS)
        assert same_bits(target(ids), source(ids))
        assert_same_tensors(target.state_dict(), state)


@every_class
def test_loading_a_float_table_into_a_quantised_one(make):
    source, target = torch.nn.Embedding(ROWS, 100), table(make, seed=7)
    target.load_state_dict(source.state_dict())
    again = make(ROWS, 100)
    again.weight.data = source.weight.data
    assert_same_tensors(tensors_of_parameter(target.weight), tensors_of_parameter(again.to("cpu").weight))


@every_class
def test_a_table_of_another_shape_is_an_error(make):
    with pytest.raises(RuntimeError, match="weight"):
        table(make).load_state_dict(table(make, rows=ROWS + 1).state_dict())


@every_class
def test_copies_saved_modules_and_moves(make):
    layer = table(make)
    before = snapshot(tensors_of_parameter(layer.weight))
    ids = torch.arange(ROWS)
    expected = layer(ids)
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(layer), torch.load(buffer, weights_only=False), layer.to("cpu").half()):
        assert same_bits(other(ids), expected)
        assert_same_tensors(tensors_of_parameter(other.weight), before)
    layer.to("meta")
    assert {t.device.type for t in tensors_of_parameter(layer.weight).values()} == {"meta"}


def test_a_table_shared_with_the_output_head_stays_shared():
    head = Linear4bit(64, ROWS, bias=False, quant_type="nf4", compress_statistics=False)
    layer = EmbeddingNF4(ROWS, 64)
    head.weight = layer.weight
    model = torch.nn.ModuleDict({"embed": layer, "head": head}).to("cpu")
    assert head.weight is layer.weight and layer.weight.bnb_quantized
    ids = torch.tensor([4, 9])
    assert same_bits(model["embed"](ids), decoded(head.weight)[ids])
    assert torch.allclose(model["head"](torch.eye(64)), decoded(head.weight).t(), atol=1e-6)
    state = model.state_dict()
    fresh = torch.nn.ModuleDict({"embed": EmbeddingNF4(ROWS, 64), "head": Linear4bit(64, ROWS, bias=False)})
    fresh.load_state_dict(state)
    assert same_bits(fresh["embed"](ids), model["embed"](ids))


# Floating-point embeddings


@pytest.mark.parametrize("cls", [Embedding, StableEmbedding])
def test_their_weights_keep_32_bit_optimizer_state(cls):
    model = torch.nn.ModuleDict({"embed": cls(1000, 8), "linear": torch.nn.Linear(100, 80, bias=False)})
    optimizer = Adam8bit(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    dtypes = {name: optimizer.state[p]["state1"].dtype for name, p in model.named_parameters() if p.numel() > 4096}
    assert dtypes == {"embed.weight": torch.float32, "linear.weight": torch.uint8}


@pytest.mark.parametrize("cls", [Embedding, StableEmbedding])
def test_initialisation(cls):
    layer = cls(100, 50, padding_idx=2)
    bound = (6 / 150) ** 0.5
    assert layer.weight[2].count_nonzero() == 0
    assert bound * 0.95 < layer.weight.abs().max() <= bound


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_stable_embedding_normalises_in_full_precision(dtype):
    layer = StableEmbedding(20, 16, padding_idx=0, dtype=dtype)
    assert layer.weight.dtype == dtype and layer.norm.weight.dtype == torch.float32
    ids = torch.tensor([[1, 2], [3, 0]])
    y = layer(ids)
    expected = torch.nn.functional.layer_norm(layer.weight[ids].float(), (16,)).to(dtype)
    assert y.dtype == dtype and torch.allclose(y.float(), expected.float(), atol=1e-6)
    y.float().square().sum().backward()
    assert layer.weight.grad is not None and layer.norm.bias.grad is not None


def test_positional_arguments_of_the_quantised_tables():
    assert Embedding4bit(4, 64, torch.bfloat16, "nf4", torch.bfloat16, "meta").weight.is_meta
    assert EmbeddingNF4(4, 64, torch.bfloat16, torch.bfloat16, "meta").weight.quant_type == "nf4"
    layer = Embedding8bit(4, 64, "meta", torch.float16)
    assert layer.weight.is_meta and layer.dtype == torch.float16


# bitsandbytes#1782: the element indices of a large vocabulary pass 2**31. Untouched pages of zeros take no memory.
LARGE_ROWS, LARGE_WIDTH = 2**24 + 3, 129


@pytest.mark.slow
def test_4_bit_rows_beyond_two_to_the_31_elements():
    numel, last = LARGE_ROWS * LARGE_WIDTH, LARGE_ROWS - 1
    assert numel > 2**31
    packed = torch.zeros((numel + 1) // 2, 1, dtype=torch.uint8)
    packed[last * LARGE_WIDTH // 2 :] = 0xFF
    state = F.QuantState(
        absmax=torch.ones(-(numel // -64)),
        shape=torch.Size((LARGE_ROWS, LARGE_WIDTH)),
        blocksize=64,
        quant_type="nf4",
        dtype=torch.float32,
    )
    table = EmbeddingNF4(LARGE_ROWS, LARGE_WIDTH, device="meta")
    table.weight = Params4bit(packed, quant_state=state, quant_type="nf4", bnb_quantized=True, module=table)
    edge = 2**31 // LARGE_WIDTH
    rows = table(torch.tensor([0, edge - 1, edge, edge + 1, last - 1, last]))
    # NF4's code 0 is -1, its code 15 is 1. The row before the last shares a byte with it where its start is odd.
    assert (rows[:4] == -1).all() and (rows[4, :-1] == -1).all() and (rows[5] == 1).all()


@pytest.mark.slow
def test_int8_rows_beyond_two_to_the_31_elements():
    last = LARGE_ROWS - 1
    codes = torch.zeros(LARGE_ROWS, LARGE_WIDTH, dtype=torch.int8)
    codes[last] = 127
    table = Embedding8bit(LARGE_ROWS, LARGE_WIDTH, device="meta", dtype=torch.float32)
    table.weight = Int8Params(codes, requires_grad=False, SCB=torch.full((LARGE_ROWS,), 2.0))
    edge = 2**31 // LARGE_WIDTH
    rows = table(torch.tensor([0, edge, edge + 1, last - 1, last]))
    assert (rows[:4] == 0).all() and torch.equal(rows[4], torch.full((LARGE_WIDTH,), 2.0))
