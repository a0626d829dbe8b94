"""The classes: signatures, what downstream reads of them, settings, overrides, refused arguments."""

import copy
import gc
import inspect
import pickle
import warnings
import weakref

import pytest
import torch

from bitsandbytes import optim
from bitsandbytes.errors import ArgumentError, UnsupportedError
from bitsandbytes.optim.optimizer import GlobalOptimManager, Optimizer1State, Optimizer2State, Optimizer8bit
from tests.helpers import dynamic_map, randn

STATE, PAGED, BITS = ", args=None, min_8bit_size=4096", ", is_paged=False", ", optim_bits=32"
ADAM = "params, lr=0.001, betas=(0.9, 0.999), eps=1e-08, weight_decay={}, amsgrad=False, optim_bits=32" + STATE
LION = "params, lr=0.0001, betas=(0.9, 0.99), weight_decay=0{}" + STATE
ADEMAMIX = (
    "params, lr=0.001, betas=(0.9, 0.999, 0.9999), alpha=5.0, t_alpha=None, t_beta3=None, eps=1e-08, "
    "weight_decay=0.01{}, min_8bit_size=4096"
)
ADAGRAD = "params, lr=0.01, lr_decay=0, weight_decay=0, initial_accumulator_value=0, eps=1e-10, optim_bits={}" + STATE
WITHOUT_PAGED = {
    "LAMB": "params, lr=0.001, bias_correction=True, betas=(0.9, 0.999), eps=1e-08, weight_decay=0, amsgrad=False, "
    "adam_w_mode=True{}" + STATE + ", max_unorm=1.0",
    "LARS": "params, lr, momentum=0, dampening=0, weight_decay=0, nesterov=False{}" + STATE + ", max_unorm=0.02",
    "SGD": "params, lr, momentum=0, dampening=0, weight_decay=0, nesterov=False{}" + STATE,
    "RMSprop": "params, lr=0.01, alpha=0.99, eps=1e-08, weight_decay=0, momentum=0, centered=False{}" + STATE,
}
WIDTHS = ("", "8bit", "32bit")

SIGNATURES = {
    **{paged + "Adam" + bits: ADAM.format("0") + PAGED for paged in ("", "Paged") for bits in WIDTHS},
    **{"AdamW" + bits: ADAM.format("0.01") + PAGED for bits in WIDTHS},
    **{"PagedAdamW" + bits: ADAM.format("0.01") for bits in WIDTHS},
    **{"Lion" + bits: LION.format("" if bits else BITS) + PAGED for bits in WIDTHS},
    **{"PagedLion" + bits: LION.format("" if bits else BITS) for bits in WIDTHS},
    **{"AdEMAMix" + bits: ADEMAMIX.format("" if bits else BITS) + PAGED for bits in WIDTHS},
    **{"PagedAdEMAMix" + bits: ADEMAMIX.format("" if bits else BITS) for bits in WIDTHS},
    **{name + bits: text.format("" if bits else BITS) for name, text in WITHOUT_PAGED.items() for bits in WIDTHS},
    **{"Adagrad" + bits: ADAGRAD.format(8 if bits == "8bit" else 32) for bits in WIDTHS},
    "PytorchLARS": "params, lr=0.01, momentum=0, dampening=0, weight_decay=0, nesterov=False, max_unorm=0.02",
}
BASE = "eps=1e-08, weight_decay=0.0, optim_bits=32" + STATE + ", max_unorm=0.0, skip_zeros=False" + PAGED
BASES = {
    Optimizer8bit: "params, defaults, optim_bits=32" + PAGED,
    Optimizer1State: "optimizer_name, params, lr=0.001, betas=(0.9, 0.0), " + BASE,
    Optimizer2State: "optimizer_name, params, lr=0.001, betas=(0.9, 0.999), "
    + BASE
    + ", alpha=0.0, t_alpha=None, t_beta3=None",
}
CLASSES = tuple(name for name in SIGNATURES if name != "PytorchLARS")


def plain_signature(cls) -> str:
    parameters = inspect.signature(cls).parameters.values()
    return ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters)


def make(name, params, **kwargs):
    if name.startswith(("SGD", "LARS")):
        kwargs = dict(lr=0.01, momentum=0.9) | kwargs
    return getattr(optim, name)(params, **kwargs)


def bits_of(name) -> int:
    return 8 if name.endswith("8bit") else 32


def parameter(n=5000, device="cpu", **kwargs):
    p = torch.nn.Parameter(randn(n, device=device, **kwargs))
    p.grad = randn(n, device=device, seed=1, **kwargs)
    return p


@pytest.fixture(autouse=True)
def manager():
    manager = GlobalOptimManager.get_instance()
    yield manager
    manager.initialize()


# --- Classes ----------------------------------------------------------------------------------------------------------


def test_all_classes_are_public():
    assert set(optim.__all__) == SIGNATURES.keys() | {"GlobalOptimManager"}
    assert all(hasattr(optim, name) for name in optim.__all__)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    assert plain_signature(getattr(optim, name)) == SIGNATURES[name]


@pytest.mark.parametrize("cls", BASES)
def test_signatures_of_bases(cls):
    assert plain_signature(cls) == BASES[cls]


@pytest.mark.parametrize("name", CLASSES)
def test_what_downstream_reads_of_a_class(name):
    cls = getattr(optim, name)
    assert "bitsandbytes" in str(cls)
    own = cls.__mro__[: cls.__mro__.index(torch.optim.Optimizer)]
    assert all(c.__module__.startswith("bitsandbytes.") for c in own)
    optimizer = make(name, [parameter()])
    assert optimizer.args.optim_bits == bits_of(name)
    assert optimizer.args.min_8bit_size == 4096
    assert optimizer.is_paged == name.startswith("Paged")
    assert not hasattr(optimizer, "optim_bits")


def test_the_base_of_adamw_follows_it():
    assert optim.AdamW.__mro__[1] is Optimizer2State


@pytest.mark.parametrize("name", CLASSES)
def test_state_of_a_step(name, device):
    p = parameter(device=device)
    optimizer = make(name, [p])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    state, two = optimizer.state[p], isinstance(optimizer, Optimizer2State)
    expected = {"step", "state1"} | ({"state2"} if two else set())
    if bits_of(name) == 8:
        expected |= {"qmap1", "absmax1"} | ({"qmap2", "absmax2"} if two else set())
        assert torch.equal(state["qmap1"].cpu(), dynamic_map(True))
        assert not two or torch.equal(state["qmap2"].cpu(), dynamic_map(False))
    if name.startswith(("LAMB", "LARS")):
        expected.add("unorm_vec")
        assert state["unorm_vec"] > 0
    assert state.keys() == expected
    assert state["step"] == 1
    stack = (2,) if "AdEMAMix" in name else ()
    dtype = torch.uint8 if bits_of(name) == 8 else torch.float32
    assert state["state1"].shape == (*stack, 5000)
    assert state["state1"].dtype == dtype
    assert not two or (state["state2"].shape == (5000,) and state["state2"].dtype == dtype)
    if dtype == torch.uint8:
        assert state["absmax1"].shape == (*stack, 20)
    assert all(t.device == p.device for t in state.values() if isinstance(t, torch.Tensor))


@pytest.mark.parametrize("bits", [32, 8])
def test_optim_bits_selects_the_state(bits):
    p = parameter()
    optimizer = optim.AdamW([p], optim_bits=bits)
    optimizer.step()
    assert optimizer.state[p]["state1"].dtype == (torch.uint8 if bits == 8 else torch.float32)


def test_small_parameters_keep_32bit_state():
    small, large = parameter(4095), parameter(4096)
    optimizer = optim.Adam8bit([small, large])
    optimizer.step()
    assert optimizer.state[small]["state1"].dtype == torch.float32
    assert optimizer.state[large]["state1"].dtype == torch.uint8

    optimizer = optim.Adam8bit([small], min_8bit_size=0)
    optimizer.step()
    assert optimizer.state[small]["state1"].dtype == torch.uint8


def test_maps_are_shared():
    a, b = parameter(), parameter()
    optimizer = optim.Adam8bit([a, b])
    optimizer.step()
    assert optimizer.state[a]["qmap1"] is optimizer.state[b]["qmap1"]


def test_args_replace_the_arguments():
    from bitsandbytes.optim.optimizer import MockArgs

    args = MockArgs(dict(optim_bits=8, min_8bit_size=16, max_unorm=0.0, skip_zeros=True))
    p = parameter(100)
    p.grad[:50] = 0
    before = p.detach().clone()
    optimizer = optim.Adam([p], args=args)
    optimizer.step()
    assert optimizer.state[p]["state1"].dtype == torch.uint8
    assert torch.equal(p.detach() == before, p.grad == 0)


# --- The step ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["AdamW", "AdEMAMix8bit", "LAMB8bit", "Lion8bit"])
def test_parameters_and_gradients_stay_the_same_objects(name, device):
    base = randn(200, 60, device=device)
    p = torch.nn.Parameter(base.t()[::2])  # not contiguous
    p.grad = randn(30, 1, device=device, seed=1).expand_as(p)
    twin = torch.nn.Parameter(p.detach().clone(memory_format=torch.contiguous_format))
    twin.grad = p.grad.clone(memory_format=torch.contiguous_format)
    pointer, gradient, untouched = p.data_ptr(), p.grad, base.t()[1::2].clone()
    make(name, [p], min_8bit_size=0).step()
    make(name, [twin], min_8bit_size=0).step()
    assert p.data_ptr() == pointer
    assert not p.is_contiguous()
    assert p.grad is gradient
    assert torch.equal(base.t()[1::2], untouched)
    torch.testing.assert_close(p, twin)


def test_closures_and_missing_gradients():
    with_grad, without = parameter(10), torch.nn.Parameter(torch.ones(10))
    optimizer = optim.SGD([with_grad, without], lr=0.1, momentum=0.9)
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        return 3.0

    assert optimizer.step(closure) == 3.0
    assert calls == [True]
    assert torch.equal(without, torch.ones(10))
    assert without not in optimizer.state


def test_group_settings_and_schedulers_act_at_once():
    a, b = parameter(10), parameter(10)
    start = a.detach().clone()
    optimizer = optim.Lion([{"params": [a]}, {"params": [b], "lr": 0.5, "weight_decay": 0.0}], lr=0.25)
    optimizer.step()
    torch.testing.assert_close((a - start).abs(), torch.full((10,), 0.25))
    torch.testing.assert_close((b - start).abs(), torch.full((10,), 0.5))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    before = a.detach().clone()
    optimizer.step()
    scheduler.step()
    assert torch.equal(a, before)


def test_added_groups_are_stepped():
    a, b = parameter(10), parameter(10)
    optimizer = optim.Adam([a], lr=0.1)
    optimizer.step()
    optimizer.add_param_group({"params": [b]})
    before = b.detach().clone()
    optimizer.step()
    assert (b != before).all()
    assert [optimizer.state[p]["step"] for p in (a, b)] == [2, 1]


def test_no_value_is_read_back_to_the_host(monkeypatch):
    """`.item()` and its relatives would make the host wait for the device."""

    def refuse(*args, **kwargs):
        raise AssertionError("a value of a tensor was read on the host")

    optimizers = [make(name, [parameter()]) for name in CLASSES if not name.startswith(("LAMB", "LARS"))]
    for reader in ("item", "tolist", "__bool__", "__float__", "__int__", "cpu", "numpy"):
        monkeypatch.setattr(torch.Tensor, reader, refuse)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.step()


@pytest.mark.parametrize("name", ["AdamW", "Lion8bit", "AdEMAMix8bit"])
def test_copies_and_pickles_go_on_alike(name):
    model = torch.nn.Linear(100, 100)

    def train(model, optimizer):
        model(torch.ones(1, 100)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    optimizer = make(name, model.parameters(), lr=0.01)
    train(model, optimizer)
    for model2, optimizer2 in (copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))):
        train(model2, optimizer2)
        assert optimizer2.state[model2.weight]["step"] == 2
        assert optimizer.state[model.weight]["step"] == 1
    train(model, optimizer)
    torch.testing.assert_close(model.weight, model2.weight, rtol=0, atol=0)


# --- Overrides --------------------------------------------------------------------------------------------------------


def test_overrides_of_a_parameter_before_and_after_the_optimizer(manager):
    a, b, c = parameter(), parameter(), parameter()
    manager.override_config(a, "optim_bits", 8)
    optimizer = optim.Adam([a, b, c])
    manager.override_config([b], key_value_dict={"optim_bits": 8, "lr": 0.0})
    before = b.detach().clone()
    optimizer.step()
    assert [optimizer.state[p]["state1"].dtype for p in (a, b, c)] == [torch.uint8, torch.uint8, torch.float32]
    assert torch.equal(b, before)
    manager.override_config(b, "lr", 0.1)
    optimizer.step()
    assert (b != before).any()


def test_overrides_of_a_module_after_the_optimizer_and_with_a_replaced_parameter(manager):
    embedding, linear = torch.nn.Embedding(100, 64), torch.nn.Linear(64, 100)
    manager.register_module_override(embedding, "weight", {"optim_bits": 32})
    embedding.weight = torch.nn.Parameter(embedding.weight.detach() + 1)
    optimizer = optim.AdamW([*embedding.parameters(), *linear.parameters()], optim_bits=8)
    linear(embedding(torch.arange(100))).sum().backward()
    optimizer.step()
    assert optimizer.state[embedding.weight]["state1"].dtype == torch.float32
    assert optimizer.state[linear.weight]["state1"].dtype == torch.uint8


def test_overrides_do_not_reach_other_optimizers(manager):
    """Positions in the groups are the same; only the parameter counts."""
    first = parameter()
    manager.override_config(first, "optim_bits", 32)
    manager.register_parameters([first])
    optim.Adam8bit([first]).step()
    second = parameter()
    optimizer = optim.Adam8bit([second])
    optimizer.step()
    assert optimizer.state[second]["state1"].dtype == torch.uint8


def test_settings_of_one_call_are_not_shared(manager):
    a, b = parameter(), parameter()
    settings = {"optim_bits": 8}
    manager.override_config([a, b], key_value_dict=settings)
    manager.override_config(a, "optim_bits", 32)
    optimizer = optim.Adam([a, b])
    optimizer.step()
    assert optimizer.state[b]["state1"].dtype == torch.uint8
    assert settings == {"optim_bits": 8}


def test_registered_overrides_follow_a_move_to_another_device_once(manager):
    host = [parameter(), parameter(6000)]
    manager.override_config(host[1], "optim_bits", 8)
    manager.register_parameters([{"params": host}])
    moved = [torch.nn.Parameter(p.detach().clone()) for p in host]
    del host
    for p in moved:
        p.grad = torch.ones_like(p)
    optimizer = optim.Adam(moved)
    optimizer.step()
    assert [optimizer.state[p]["state1"].dtype for p in moved] == [torch.float32, torch.uint8]
    again = [torch.nn.Parameter(p.detach().clone()) for p in moved]
    for p in again:
        p.grad = torch.ones_like(p)
    optimizer = optim.Adam(again)
    optimizer.step()
    assert optimizer.state[again[1]]["state1"].dtype == torch.float32


def test_the_manager_keeps_nothing_alive(manager):
    module, p = torch.nn.Linear(2, 2), parameter(10)
    manager.register_module_override(module, "weight", {"optim_bits": 32})
    manager.override_config(p, "lr", 1.0)
    gone = [weakref.ref(module), weakref.ref(p)]
    del module, p
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    assert len(manager.configs) == 0
    other = torch.nn.Linear(2, 2)
    manager.register_module_override(other, "weight", {})
    assert len(manager.module_weight_config_triple) == 1
    del other
    gc.collect()
    optim.Adam([parameter(10)]).step()  # a dead module is skipped


def test_the_manager_is_one_and_refuses_nonsense(manager):
    assert GlobalOptimManager.get_instance() is manager
    with pytest.raises(RuntimeError):
        GlobalOptimManager()
    with pytest.raises(ValueError, match="key"):
        manager.override_config(parameter(), "lr", 1.0, {"lr": 2.0})
    with pytest.raises(AttributeError, match="no 'wieght'"):
        manager.register_module_override(torch.nn.Linear(2, 2), "wieght", {})


# --- Refused arguments ------------------------------------------------------------------------------------------------

UNSUPPORTED = [
    *((name, dict(amsgrad=True)) for name in CLASSES if "Adam" in name or name.startswith("LAMB")),
    *((name, dict(optim_bits=8)) for name in ("Adam8bit", "AdamW8bit", "PagedAdam8bit", "PagedAdamW8bit")),
    *((name, dict(optim_bits=8)) for name in ("Adam32bit", "AdamW32bit", "PagedAdam32bit", "Adagrad32bit")),
    *((name, dict(optim_bits=4)) for name in ("Adam", "Lion", "AdEMAMix", "SGD", "LAMB")),
    ("Adagrad8bit", dict(optim_bits=32)),
    *((name, dict(lr_decay=0.1)) for name in ("Adagrad", "Adagrad8bit", "Adagrad32bit")),
    *((name, dict(initial_accumulator_value=0.1)) for name in ("Adagrad", "Adagrad8bit", "Adagrad32bit")),
    *((name, dict(bias_correction=False)) for name in ("LAMB", "LAMB8bit", "LAMB32bit")),
    *((name, dict(adam_w_mode=False)) for name in ("LAMB", "LAMB8bit", "LAMB32bit")),
    *(("LAMB8bit", dict(max_unorm=bound)) for bound in (0.0, 0.5)),
    *((name, dict(momentum=0)) for name in CLASSES if name.startswith(("SGD", "LARS"))),
    *((name, dict(dampening=0.1)) for name in CLASSES if name.startswith(("SGD", "LARS"))),
    *((name, dict(nesterov=True)) for name in CLASSES if name.startswith(("SGD", "LARS"))),
    *((name, dict(centered=True)) for name in CLASSES if name.startswith("RMSprop")),
    *((name, dict(momentum=0.9)) for name in CLASSES if name.startswith("RMSprop")),
    *((name, dict(alpha=0)) for name in CLASSES if name.startswith("RMSprop")),
]
UNSUPPORTED = [(name, kwargs) for name, kwargs in UNSUPPORTED if not ("AdEMAMix" in name and "amsgrad" in kwargs)]


@pytest.mark.parametrize(("name", "kwargs"), UNSUPPORTED, ids=lambda v: v if isinstance(v, str) else "-".join(v))
def test_arguments_that_would_be_ignored_are_refused(name, kwargs):
    with pytest.raises(UnsupportedError, match=next(iter(kwargs))) as error:
        make(name, [parameter(10)], **kwargs)
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize("name", CLASSES)
def test_hyperparameters_out_of_range_are_refused(name):
    wrong = [dict(lr=-1.0), dict(weight_decay=-1.0), dict(lr=float("nan"))]
    wrong += [dict(eps=-1.0)] if "eps=" in SIGNATURES[name] else []
    wrong += [dict(betas=(1.0, 0.9, 0.9)), dict(betas=(0.9, -0.1, 0.9))] if "betas=" in SIGNATURES[name] else []
    for kwargs in wrong:
        with pytest.raises(ValueError, match=next(iter(kwargs))):
            make(name, [parameter(10)], **kwargs)


def test_betas_may_be_text():
    assert optim.AdamW([parameter(10)], betas="(0.8, 0.95)").param_groups[0]["betas"] == (0.8, 0.95)


@pytest.mark.parametrize("name", ["LAMB", "LARS", "LAMB32bit", "LARS8bit"])
@pytest.mark.parametrize("bound", [0.0, 0.5, 2.0])
def test_the_bound_on_the_norm_reaches_the_settings(name, bound):
    p = parameter()
    optimizer = make(name, [p], max_unorm=bound)
    assert optimizer.args.max_unorm == bound
    before = p.detach().clone()
    optimizer.step()
    update = (p - before).norm() / optimizer.param_groups[0]["lr"]
    if bound:
        torch.testing.assert_close(update, torch.minimum(bound * before.norm(), update), rtol=1e-3, atol=0)
        assert update < 1.01 * bound * before.norm()


def test_dtypes_that_no_rule_covers_are_refused():
    p = torch.nn.Parameter(torch.ones(10, dtype=torch.float64))
    p.grad = torch.ones_like(p)
    with pytest.raises(ArgumentError, match="float64"):
        optim.Adam([p]).step()
