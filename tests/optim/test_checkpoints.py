"""state_dict and load_state_dict: the on-disk form, upstream's checkpoints, former formats, dtypes, devices."""

import copy
import io

import pytest
from safetensors.torch import load_file
import torch

from bitsandbytes import optim
from tests.helpers import GOLDEN, dynamic_map, randn

WRAPPED = "__bnb_optimizer_quant_state__"
OLD_BLOCKSIZE = 2048
GOLDEN_CLASSES = ("AdEMAMix8bit", "Adam8bit", "AdamW32bit", "AdamW8bit", "Lion8bit", "RMSprop8bit")
MAKERS = {
    "Adam8bit": lambda p: optim.Adam8bit(p, lr=0.01),
    "AdamW": lambda p: optim.AdamW(p, lr=0.01),
    "AdEMAMix8bit": lambda p: optim.AdEMAMix8bit(p, lr=0.01, t_alpha=10, t_beta3=10),
    "Lion8bit": lambda p: optim.Lion8bit(p, lr=0.01),
    "LAMB8bit": lambda p: optim.LAMB8bit(p, lr=0.01),
    "LARS": lambda p: optim.LARS(p, lr=0.01, momentum=0.9),
    "PagedAdamW8bit": lambda p: optim.PagedAdamW8bit(p, lr=0.01),
}
SHAPES = ((70, 90), (10,))


def parameters(dtype=torch.float32, device="cpu"):
    return [torch.nn.Parameter(randn(*s, dtype=dtype, device=device, seed=i)) for i, s in enumerate(SHAPES)]


def train(params, optimizer, steps, first=0):
    for step in range(first, first + steps):
        for p in params:
            p.grad = randn(*p.shape, dtype=p.dtype, device=p.device, seed=50 + step, scale=0.1)
        optimizer.step()


def through_disk(state_dict):
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def assert_same_state(actual, expected):
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert actual[key].dtype == value.dtype, key
            assert torch.equal(actual[key], value), key
        else:
            assert actual[key] == value and type(actual[key]) is type(value), key


def flat(state_dict):
    """The form without the nested dict."""
    states = {
        key: {k: v for k, v in s.items() if k != WRAPPED} | s.get(WRAPPED, {}) for key, s in state_dict["state"].items()
    }
    return {**state_dict, "state": states}


# --- Upstream's checkpoints -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GOLDEN_CLASSES)
def test_upstream_states_load_and_go_on(name, device):
    saved = torch.load(GOLDEN / "optim" / f"{name}.state.pt", weights_only=True)
    tensors = {k: v.to(device) for k, v in load_file(GOLDEN / "optim" / f"{name}.safetensors").items()}
    p = torch.nn.Parameter(tensors["param_before"].clone())
    optimizer = getattr(optim, name)([p])
    optimizer.load_state_dict(saved)
    assert_same_state({k: v for k, v in optimizer.state_dict()["param_groups"][0].items() if k != "params"},
                      {k: v for k, v in saved["param_groups"][0].items() if k != "params"})  # fmt: skip
    p.grad = tensors["grad"]
    optimizer.step()
    assert optimizer.state[p]["step"] == 4
    torch.testing.assert_close(p.detach(), tensors["param_after"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", GOLDEN_CLASSES)
def test_what_is_saved_has_upstreams_form(name):
    saved = torch.load(GOLDEN / "optim" / f"{name}.state.pt", weights_only=True)
    p = torch.nn.Parameter(randn(96, 64))
    optimizer = getattr(optim, name)([p])
    train([p], optimizer, 1)
    ours = through_disk(optimizer.state_dict())
    assert ours.keys() == saved.keys()
    assert ours["param_groups"][0].keys() == saved["param_groups"][0].keys()
    assert ours["state"][0].keys() == saved["state"][0].keys() == {"step", WRAPPED}
    theirs = saved["state"][0][WRAPPED]
    form = {k: (t.shape, t.dtype) for k, t in ours["state"][0][WRAPPED].items()}
    assert form == {k: (t.shape, t.dtype) for k, t in theirs.items()}
    for qmap in ("qmap1", "qmap2"):
        if qmap in theirs:
            assert torch.equal(ours["state"][0][WRAPPED][qmap], theirs[qmap])


# --- Round trips ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", ["wrapped", "flat"])
@pytest.mark.parametrize("name", MAKERS)
def test_training_goes_on_alike(name, form, dtype, device):
    params = parameters(dtype, device)
    optimizer = MAKERS[name](params)
    train(params, optimizer, 3)
    saved = through_disk(optimizer.state_dict())
    params2 = [torch.nn.Parameter(p.detach().clone()) for p in params]
    optimizer2 = MAKERS[name](params2)
    optimizer2.load_state_dict(saved if form == "wrapped" else flat(saved))
    for p, p2 in zip(params, params2, strict=True):
        assert_same_state(optimizer2.state[p2], optimizer.state[p])
        assert optimizer2.state[p2]["state1"].dtype in (torch.uint8, torch.float32)  # never the parameter's dtype
    train(params, optimizer, 2, first=3)
    train(params2, optimizer2, 2, first=3)
    for p, p2 in zip(params, params2, strict=True):
        assert torch.equal(p, p2)


def test_saving_leaves_the_live_state_flat_and_loading_copies():
    params = parameters()
    optimizer = optim.Adam8bit(params)
    train(params, optimizer, 1)
    saved = optimizer.state_dict()
    assert WRAPPED not in optimizer.state[params[0]]
    before = copy.deepcopy(saved)
    optimizer2 = optim.Adam8bit(parameters())
    optimizer2.load_state_dict(saved)
    train(optimizer2.param_groups[0]["params"], optimizer2, 2)
    assert set(saved["state"][0]) == {"step", WRAPPED}
    assert_same_state(saved["state"][0][WRAPPED], before["state"][0][WRAPPED])


def test_maps_stay_shared_after_loading():
    params = [torch.nn.Parameter(randn(5000)) for _ in range(2)]
    optimizer = optim.Adam8bit(params)
    train(params, optimizer, 1)
    optimizer.load_state_dict(through_disk(optimizer.state_dict()))
    assert optimizer.state[params[0]]["qmap1"] is optimizer.state[params[1]]["qmap1"]


def test_an_empty_state_loads():
    params = parameters()
    optimizer = optim.AdamW8bit(params)
    optimizer.load_state_dict(through_disk(optimizer.state_dict()))
    train(params, optimizer, 1)
    assert optimizer.state[params[0]]["step"] == 1


def test_settings_and_hooks_are_those_of_torch():
    params = parameters()
    optimizer = optim.AdamW(params, lr=0.5)
    optimizer2 = optim.AdamW(parameters(), lr=0.1)
    called = []
    optimizer2.register_load_state_dict_post_hook(lambda o: called.append(o.param_groups[0]["lr"]))
    optimizer2.load_state_dict(optimizer.state_dict())
    assert called == [0.5]


def test_a_step_saved_as_a_tensor_loads_as_a_number():
    params = parameters()
    optimizer = optim.AdamW8bit(params)
    train(params, optimizer, 2)
    saved = optimizer.state_dict()
    saved["state"][0]["step"] = torch.tensor(2.0)
    optimizer.load_state_dict(saved)
    assert type(optimizer.state[params[0]]["step"]) is int
    train(params, optimizer, 1)
    assert optimizer.state[params[0]]["step"] == 3


def test_move_to_device(device):
    params = parameters(device="cpu")
    optimizer = optim.Adam8bit(params)
    train(params, optimizer, 1)
    saved = optimizer.state_dict()
    moved = parameters(device="meta")
    optimizer = optim.Adam8bit(moved)
    optimizer.load_state_dict(saved)
    assert {t.device.type for t in optimizer.state[moved[0]].values() if torch.is_tensor(t)} == {"meta"}
    optimizer.load_state_dict(saved, False)
    assert {t.device.type for t in optimizer.state[moved[0]].values() if torch.is_tensor(t)} == {"cpu"}
    optimizer.to_gpu()
    assert {t.device.type for t in optimizer.state[moved[0]].values() if torch.is_tensor(t)} == {"meta"}


@pytest.mark.parametrize(
    "other", [lambda p: optim.Adam8bit(p[:1]), lambda p: optim.Adam8bit([{"params": p[:1]}, {"params": p[1:]}])]
)
def test_groups_that_do_not_fit_are_refused(other):
    params = parameters()
    saved = optim.Adam8bit(params).state_dict()
    with pytest.raises(ValueError, match="group"):
        other(params).load_state_dict(saved)


# --- Former formats ---------------------------------------------------------------------------------------------------


def in_old_blocks(state, signed):
    """A state's 8-bit form with blocks of 2048: (codes, absmax, map)."""
    code = dynamic_map(signed)
    return (*torch.ops.bitsandbytes.quantize_blockwise(state, code, OLD_BLOCKSIZE), code)


@pytest.mark.parametrize("numel", [200, 256, 5000, 6144])
def test_states_in_blocks_of_2048_are_renewed(numel, device):
    """A checkpoint of an old release goes on close to uninterrupted training in 32 bits."""
    p = torch.nn.Parameter(randn(numel, device=device))
    exact = torch.nn.Parameter(p.detach().clone())
    reference = optim.AdamW32bit([exact], lr=0.01)
    train([exact], reference, 3)
    state = reference.state[exact]
    saved = optim.AdamW8bit([p], lr=0.01).state_dict()
    saved["state"] = {0: {"step": 3}}
    for i, signed in (("1", True), ("2", False)):
        keys = ("state" + i, "absmax" + i, "qmap" + i)
        saved["state"][0].update(zip(keys, in_old_blocks(state["state" + i].cpu(), signed), strict=True))
    optimizer = optim.AdamW8bit([p], lr=0.01, min_8bit_size=0)
    optimizer.load_state_dict(saved)
    assert optimizer.state[p]["absmax1"].shape == (-(numel // -256),)
    assert optimizer.state[p]["state1"].dtype == torch.uint8

    p.data.copy_(exact)
    before = p.detach().clone()
    train([p], optimizer, 1, first=3)
    train([exact], reference, 1, first=3)
    assert (p - exact).norm() < 0.05 * (exact - before).norm()


def test_states_of_any_other_blocksize_are_refused():
    params = parameters()
    optimizer = optim.AdamW8bit(params)
    train(params, optimizer, 1)
    for spoil in (lambda s: s.update(absmax1=torch.zeros(7)), lambda s: s.pop("absmax1")):
        saved = flat(optimizer.state_dict())
        spoil(saved["state"][0])
        with pytest.raises(ValueError, match="absmax1 must have one value per block of 256 or 2048"):
            optim.AdamW8bit(params).load_state_dict(saved)


def test_32bit_state_loads_into_an_8bit_optimizer_and_stays():
    params = parameters()
    optimizer = optim.AdamW(params)
    train(params, optimizer, 1)
    other = optim.AdamW8bit(params)
    other.load_state_dict(optimizer.state_dict())
    train(params, other, 1)
    assert other.state[params[0]]["state1"].dtype == torch.float32
