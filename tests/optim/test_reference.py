"""The optimizers against torch.optim, lion_pytorch and formulas written out here; 8-bit against 32-bit."""

from lion_pytorch import Lion as PytorchLion
import pytest
import torch

from bitsandbytes import optim
from tests.helpers import double, randn

SHAPE = (70, 90)  # 6300 elements: 24 blocks and a short one


class Formula(torch.optim.Optimizer):
    """An optimizer from one function of (group, p, grad, state, step), in float64."""

    def __init__(self, params, update, **settings):
        super().__init__(params, settings)
        self.update, self.count = update, 0

    @torch.no_grad()
    def step(self):
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.update(group, double(p), double(p.grad), self.state[p], self.count))


def lamb(h, p, g, state, step):
    m = state["m"] = 0.9 * state.get("m", 0) + 0.1 * g
    v = state["v"] = 0.999 * state.get("v", 0) + 0.001 * g * g
    r = (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8)
    ratio = min(1.0, float(h["max_unorm"] * p.norm() / r.norm()))
    return p * (1 - h["lr"] * h["weight_decay"]) - h["lr"] * ratio * r


def lars(h, p, g, state, step):
    m = state["m"] = h["momentum"] * state.get("m", 0) + g + h["weight_decay"] * p
    return p - h["lr"] * min(1.0, float(h["max_unorm"] * p.norm() / m.norm())) * m


def ademamix(h, p, g, state, step):
    share, grow = min(step / h["t"], 1.0), step < h["t"]
    log_start, log_end = torch.tensor([0.9, 0.9999], dtype=torch.float64).log()
    beta3 = (log_start * log_end / ((1 - share) * log_end + share * log_start)).exp() if grow else 0.9999
    m1 = state["m1"] = 0.9 * state.get("m1", 0) + 0.1 * g
    m2 = state["m2"] = beta3 * state.get("m2", 0) + (1 - beta3) * g
    v = state["v"] = 0.999 * state.get("v", 0) + 0.001 * g * g
    r = (m1 / (1 - 0.9**step) + share * 5 * m2) / ((v / (1 - 0.999**step)).sqrt() + 1e-8)
    return p * (1 - h["lr"] * h["weight_decay"]) - h["lr"] * r


WD = dict(lr=0.01, weight_decay=0.1)
MOMENTUM = WD | dict(momentum=0.9)
#: name -> (ours, by number of bits; the reference)
PAIRS = {
    "Adam": (
        lambda p, bits: optim.Adam(p, **WD, optim_bits=bits),
        lambda p: torch.optim.AdamW(p, **WD),
    ),
    "AdamW": (
        lambda p, bits: optim.AdamW(p, **WD, betas=(0.8, 0.95), eps=1e-3, optim_bits=bits),
        lambda p: torch.optim.AdamW(p, **WD, betas=(0.8, 0.95), eps=1e-3),
    ),
    "Lion": (
        lambda p, bits: optim.Lion(p, **WD, optim_bits=bits),
        lambda p: PytorchLion(p, **WD),
    ),
    "SGD": (
        lambda p, bits: optim.SGD(p, **MOMENTUM, optim_bits=bits),
        lambda p: torch.optim.SGD(p, **MOMENTUM),
    ),
    "RMSprop": (
        lambda p, bits: optim.RMSprop(p, **WD, alpha=0.9, optim_bits=bits),
        lambda p: torch.optim.RMSprop(p, **WD, alpha=0.9),
    ),
    "Adagrad": (
        lambda p, bits: optim.Adagrad(p, **WD, optim_bits=bits),
        lambda p: torch.optim.Adagrad(p, **WD),
    ),
    "LAMB": (
        lambda p, bits: optim.LAMB(p, **WD, optim_bits=bits),
        lambda p: Formula(p, lamb, **WD, max_unorm=1.0),
    ),
    "LARS": (
        lambda p, bits: optim.LARS(p, **MOMENTUM, optim_bits=bits),
        lambda p: Formula(p, lars, **MOMENTUM, max_unorm=0.02),
    ),
    "LARS of PyTorch": (
        lambda p, bits: optim.LARS(p, **MOMENTUM, optim_bits=bits),
        lambda p: optim.PytorchLARS(p, **MOMENTUM),
    ),
    "AdEMAMix": (
        lambda p, bits: optim.AdEMAMix(p, **WD, optim_bits=bits),
        lambda p: optim.ademamix._ReferenceAdEMAMix(p, **WD),
    ),
    "AdEMAMix with schedules": (
        lambda p, bits: optim.AdEMAMix(p, **WD, t_alpha=6, t_beta3=6, optim_bits=bits),
        lambda p: Formula(p, ademamix, **WD, t=6),
    ),
    "reference AdEMAMix with schedules": (
        lambda p, bits: optim.ademamix._ReferenceAdEMAMix(p, **WD, t_alpha=6, t_beta3=6),
        lambda p: Formula(p, ademamix, **WD, t=6),
    ),
}


def pair(name, bits, dtype, device):
    ours = torch.nn.Parameter(randn(*SHAPE, dtype=dtype, device=device, scale=0.1))
    theirs = torch.nn.Parameter(ours.detach().float().clone())
    make, reference = PAIRS[name]
    return ours, make([ours], bits), theirs, reference([theirs])


def gradients(steps, dtype, device):
    return [randn(*SHAPE, dtype=dtype, device=device, seed=100 + i, scale=0.01) for i in range(steps)]


@pytest.mark.parametrize("name", PAIRS)
def test_32bit(name, device):
    ours, optimizer, theirs, reference = pair(name, 32, torch.float32, device)
    for g in gradients(10, torch.float32, device):
        ours.grad, theirs.grad = g.clone(), g.clone()
        optimizer.step()
        reference.step()
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [n for n in PAIRS if not n.startswith("reference")])
def test_half_precision_parameters(name, dtype, device):
    ours, optimizer, theirs, reference = pair(name, 32, dtype, device)
    for g in gradients(10, dtype, device):
        ours.grad, theirs.grad = g.clone(), g.float()
        optimizer.step()
        reference.step()
        # One rounding of p a step; the states see fp32.
        torch.testing.assert_close(ours, theirs.detach().to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-5)
        theirs.data.copy_(ours)


@pytest.mark.parametrize("name", [n for n in PAIRS if not n.startswith("reference")])
def test_8bit_is_close_to_32bit(name, device):
    ours, optimizer, theirs, reference = pair(name, 8, torch.float32, device)
    start = theirs.detach().clone()
    for g in gradients(20, torch.float32, device):
        ours.grad, theirs.grad = g.clone(), g.clone()
        optimizer.step()
        reference.step()
    assert optimizer.state[ours]["state1"].dtype == torch.uint8
    # Relative to how far the parameter went. Lion takes steps of full length, whatever the error.
    error = (ours - theirs).norm() / (theirs - start).norm()
    assert error < (0.1 if name == "Lion" else 0.03)


def test_8bit_adam_on_the_host_needs_two_bytes_an_element(device):
    p = torch.nn.Parameter(randn(1 << 16, device=device))
    p.grad = torch.ones_like(p)
    optimizer = optim.AdamW8bit([p])
    optimizer.step()
    size = sum(t.numel() * t.itemsize for t in optimizer.state[p].values() if isinstance(t, torch.Tensor))
    assert size < 2.1 * p.numel()


@pytest.mark.parametrize("bits", [32, 8])
def test_decay_of_lion_does_not_enter_the_sign(bits, device):
    """A small gradient against a large parameter: coupled decay would turn the direction."""
    p = torch.nn.Parameter(torch.full((5000,), 10.0, device=device))
    p.grad = torch.full_like(p, -1e-3)
    optim.Lion([p], lr=0.1, weight_decay=0.1, optim_bits=bits).step()
    torch.testing.assert_close(p.detach(), torch.full_like(p, 10 * (1 - 0.01) + 0.1))


@pytest.mark.parametrize("bits", [32, 8])
@pytest.mark.parametrize("name", ["Adam", "AdamW", "LAMB", "AdEMAMix"])
def test_decay_acts_on_the_old_parameter(name, bits, device):
    """Large lr and decay, so that the order shows: 2 * (1 - 0.1 * 0.5) - 0.1 against (2 - 0.1) * (1 - 0.05)."""
    p = torch.nn.Parameter(torch.full((5000,), 2.0, device=device))
    p.grad = torch.ones_like(p)
    kwargs = dict(alpha=0.0) if name == "AdEMAMix" else {}
    getattr(optim, name)([p], lr=0.1, weight_decay=0.5, optim_bits=bits, **kwargs).step()
    torch.testing.assert_close(p.detach(), torch.full_like(p, 1.8), rtol=1e-6, atol=1e-6)


def test_the_ademamix_schedule_reaches_its_end():
    from bitsandbytes.optim.ademamix import scheduled

    assert scheduled(5.0, 0.9, 0.9999, None, None, 1) == (5.0, 0.9999)
    assert scheduled(5.0, 0.9, 0.9999, 10, 10, 10) == (5.0, 0.9999)
    assert scheduled(5.0, 0.9, 0.9999, 10, 10, 10**6) == (5.0, 0.9999)
    values = [scheduled(5.0, 0.9, 0.9999, 10, 10, step) for step in range(1, 11)]
    assert values == sorted(values)
    assert scheduled(5.0, 0.0, 0.9999, 10, 10, 5)[1] < 0.9999
    assert scheduled(8.0, 0.9, 0.9, 4, 4, 1) == pytest.approx((2.0, 0.9))
