"""The layers under torch.compile: no graph breaks, and no recompilation for every batch size."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from bitsandbytes.nn import Embedding8bit, EmbeddingNF4, Linear4bit, Linear8bitLt, Params4bit

from .helpers import randn

WIDTH = 64
# One graph for a single row, one for a number of rows that dynamo leaves open, and one more for int8, whose first
# forward fills the state.
GRAPHS = 3


def linear4(**kwargs):
    layer = Linear4bit(WIDTH, WIDTH, quant_type="nf4", compute_dtype=torch.float32, **kwargs)
    layer.weight = Params4bit(
        randn(WIDTH, WIDTH) / 8,
        quant_type="nf4",
        compress_statistics=layer.weight.compress_statistics,
        quant_storage=layer.quant_storage,
        module=layer,
    )
    return layer


def linear8(threshold=0.0, has_fp16_weights=False):
    layer = Linear8bitLt(WIDTH, WIDTH, has_fp16_weights=has_fp16_weights, threshold=threshold)
    layer.weight.data = randn(WIDTH, WIDTH) / 8
    return layer


class WithLora(torch.nn.Module):
    """A frozen quantised layer and a trained low-rank one, as PEFT puts them together."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = torch.nn.Linear(WIDTH, 4, bias=False)
        self.up = torch.nn.Linear(4, WIDTH, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


MODELS = {
    "4-bit": lambda: linear4(compress_statistics=False),
    "4-bit nested": lambda: linear4(),
    "4-bit in bfloat16 storage": lambda: linear4(quant_storage=torch.bfloat16),
    "int8": linear8,
    "int8 with outliers": lambda: linear8(threshold=2.0),
    "int8 kept in floating point": lambda: linear8(has_fp16_weights=True),
    "both": lambda: torch.nn.Sequential(linear4(), torch.nn.GELU(), linear8()),
    "LoRA on 4-bit": lambda: WithLora(linear4()),
    "LoRA on int8": lambda: WithLora(linear8()),
}
# The number of outlier columns depends on the values of the input, which no single graph can hold. Training does not
# look for them.
CASES = [(name, train) for name in MODELS for train in (False, True) if train or name != "int8 with outliers"]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def run(model, train, rows):
    x = randn(rows, WIDTH, seed=rows)
    if not train:
        with torch.no_grad():
            return [model(x)]
    x.requires_grad_()
    model.zero_grad()
    y = model(x)
    y.square().sum().backward()
    trained = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [y.detach(), x.grad, *trained]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name, train", CASES)
def test_one_graph_for_all_batch_sizes(name, train, backend):
    model = MODELS[name]().to("cpu").train(train)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    for rows in (1, 3, 17, 1, 5):
        for actual, expected in zip(run(compiled, train, rows), run(model, train, rows), strict=True):
            assert torch.allclose(actual, expected, rtol=1e-4, atol=1e-4)
    assert 1 <= counter.frame_count <= GRAPHS


@pytest.mark.slow
def test_int8_with_outliers_compiles_with_a_break_around_them():
    model = linear8(threshold=2.0).to("cpu").eval()
    compiled = torch.compile(model, dynamic=True, backend="aot_eager")
    for rows in (1, 3, 5):
        assert torch.allclose(run(compiled, False, rows)[0], run(model, False, rows)[0], atol=1e-4)


def test_optimizer_steps_do_not_recompile():
    model = WithLora(linear4()).to("cpu")
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    losses = []
    for _ in range(5):
        loss = compiled(randn(8, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert counter.frame_count == 1 and losses[-1] < losses[0]


def test_a_loaded_weight_needs_no_new_graph():
    model, other = linear4().to("cpu"), linear4(bias=True).to("cpu")
    other.load_state_dict(Linear4bit(WIDTH, WIDTH, quant_type="nf4").to("cpu").state_dict())
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    x = randn(4, WIDTH)
    with torch.no_grad():
        compiled(x)
        model.load_state_dict(other.state_dict())
        assert torch.allclose(compiled(x), other(x), atol=1e-5)
    assert counter.frame_count <= GRAPHS


@pytest.mark.parametrize("make", [EmbeddingNF4, Embedding8bit])
@pytest.mark.parametrize("width", [64, 100])
def test_lookups(make, width):
    layer = make(30, width).to("cpu")
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    ids = torch.tensor([[1, 2, 29]])
    assert torch.equal(compiled(ids), layer(ids))


@pytest.mark.slow
@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", ["4-bit nested", "int8", "LoRA on 4-bit"])
def test_inductor(name, train):
    model = MODELS[name]().to("cpu").train(train)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="inductor")
    for rows in (1, 3, 17):
        for actual, expected in zip(run(compiled, train, rows), run(model, train, rows), strict=True):
            assert torch.allclose(actual, expected, rtol=1e-3, atol=1e-3)
