"""The operators: rules by table, layouts, dtypes, bounds on the norm, skipping of zeros, refused arguments."""

import pytest
import torch

from bitsandbytes._ops.optim import STATE_ROWS
from bitsandbytes.backends.default._blocks import SPAN
from bitsandbytes.backends.default.optim import RULES
from bitsandbytes.errors import ArgumentError
import bitsandbytes.functional as F
from tests.cases.optim import CASES
from tests.helpers import FLOATS, LAYOUTS, Unchanged, dynamic_map, randn, storage_bytes

BLOCK = 256
HYPER = dict(
    beta1=0.9, beta2=0.99, beta3=0.999, alpha=5.0, eps=1e-8, weight_decay=0.1, step=3, lr=0.01, gnorm_scale=1.0
)
NORM = dict(unorm_vec=None, max_unorm=0.0, param_norm=0.0)
OPTIMIZERS = tuple(STATE_ROWS)
TWO_STATES = ("adam", "lamb", "ademamix")


def states32(name, p, fill=None):
    """fp32 (state1, state2); random ones, not negative where they are second moments, unless `fill` is given."""
    values = [torch.zeros_like(p, dtype=torch.float32) for _ in range(sum(STATE_ROWS[name]))]
    for i, value in enumerate(values):
        if fill is not None:
            value.fill_(fill[i])
        else:
            value.copy_(randn(*p.shape, seed=10 + i, scale=0.01))
    if fill is None and (name in TWO_STATES or name in ("rmsprop", "adagrad")):
        values[-1].abs_()
    stacked = torch.stack(values[:2]) if name == "ademamix" else values[0]
    return stacked, values[-1] if name in TWO_STATES else None


def encode(state, signed, device):
    code = dynamic_map(signed).to(device)
    return (*torch.ops.bitsandbytes.quantize_blockwise(state, code, BLOCK), code)


def states8(name, state1, state2, device):
    """(state1, state2, qmap1, qmap2, absmax1, absmax2)"""
    if name == "ademamix":
        rows = [encode(row, True, device) for row in state1]
        codes1, absmax1, map1 = torch.stack([r[0] for r in rows]), torch.stack([r[1] for r in rows]), rows[0][2]
    else:
        codes1, absmax1, map1 = encode(state1, name not in ("rmsprop", "adagrad"), device)
    codes2, absmax2, map2 = encode(state2, False, device) if state2 is not None else (None, None, None)
    return codes1, codes2, map1, map2, absmax1, absmax2


def inputs32(name, shape=(9, 100), dtype=torch.float32, device="cpu", **changes):
    """Arguments of optimizer_update_32bit by name, in the operator's order."""
    p, g = randn(*shape, dtype=dtype, device=device, seed=1), randn(*shape, dtype=dtype, device=device, seed=2)
    state1, state2 = states32(name, p)
    args = dict(optimizer_name=name, g=g, p=p, state1=state1, state2=state2, **NORM, **HYPER, skip_zeros=False)
    return args | changes


ORDER8 = (
    *("optimizer_name", "g", "p", "state1", "state2", "beta1", "beta2", "beta3", "alpha", "eps", "step", "lr"),
    *("qmap1", "qmap2", "absmax1", "absmax2", "weight_decay", "gnorm_scale", "skip_zeros"),
)
ORDER32 = (
    *("optimizer_name", "g", "p", "state1", "state2", "unorm_vec", "max_unorm", "param_norm", "beta1", "beta2"),
    *("beta3", "alpha", "eps", "weight_decay", "step", "lr", "gnorm_scale", "skip_zeros"),
)
TENSORS = ("p", "state1", "state2", "absmax1", "absmax2", "unorm_vec")


def inputs8(name, shape=(9, 100), dtype=torch.float32, device="cpu", **changes):
    """Arguments of optimizer_update_8bit_blockwise by name, in the operator's order."""
    args = inputs32(name, shape, dtype, device)
    keys = ("state1", "state2", "qmap1", "qmap2", "absmax1", "absmax2")
    args |= dict(zip(keys, states8(name, args["state1"], args["state2"], device), strict=True))
    return {key: args[key] for key in ORDER8} | changes


def op(bits):
    ops = torch.ops.bitsandbytes
    return ops.optimizer_update_32bit if bits == 32 else ops.optimizer_update_8bit_blockwise


def run(bits, args):
    """Run the operator; the tensors that it may change."""
    assert tuple(args) == (ORDER32 if bits == 32 else ORDER8)
    assert op(bits)(*args.values()) is None
    return {key: args[key] for key in TENSORS if args.get(key) is not None}


def inputs(bits, name, *rest, **kwargs):
    return (inputs32 if bits == 32 else inputs8)(name, *rest, **kwargs)


def copied(args):
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in args.items()}


def close(actual, expected, tolerance=1e-6):
    assert actual.keys() == expected.keys()
    for key in expected:
        torch.testing.assert_close(actual[key], expected[key], rtol=tolerance, atol=tolerance, msg=key)


def test_every_rule_is_declared_once():
    assert RULES.keys() == STATE_ROWS.keys()


@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (2, 3, 100)], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_32bit_rules(case, shape, device):
    p, g = torch.full(shape, case.p, device=device), torch.full(shape, case.g, device=device)
    state1, state2 = states32(case.optimizer, p, [before for before, _ in case.states])
    hyper = HYPER | dict(eps=0.0, weight_decay=0.0, step=case.step) | case.hyper
    args = dict(
        optimizer_name=case.optimizer, g=g, p=p, state1=state1, state2=state2, **NORM, **hyper, skip_zeros=False
    )
    run(32, args)
    torch.testing.assert_close(p, torch.full_like(p, case.p_after))
    moments = list(state1) if case.optimizer == "ademamix" else [state1]
    for moment, (_, after) in zip([*moments, *([state2] if state2 is not None else [])], case.states, strict=True):
        torch.testing.assert_close(moment, torch.full_like(moment, after))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_8bit_rules(case, device):
    # A block of equal positive values is held exactly: its absmax times the level 1.
    p, g = torch.full((300,), case.p, device=device), torch.full((300,), case.g, device=device)
    signs = [after < 0 or before < 0 for before, after in case.states]
    state1, state2 = states32(case.optimizer, p, [before for before, _ in case.states])
    keys = ("state1", "state2", "qmap1", "qmap2", "absmax1", "absmax2")
    hyper = HYPER | dict(eps=0.0, weight_decay=0.0, step=case.step) | case.hyper
    args = dict(optimizer_name=case.optimizer, g=g, p=p, **hyper, skip_zeros=False)
    args |= dict(zip(keys, states8(case.optimizer, state1, state2, device), strict=True))
    run(8, {key: args[key] for key in ORDER8})
    # The lowest level of the signed map is -0.993, so a negative state is off by 0.7 %.
    torch.testing.assert_close(p, torch.full_like(p, case.p_after))
    for i, (_, after) in enumerate(case.states):
        absmax = args["absmax2"] if i == len(case.states) - 1 and state2 is not None else args["absmax1"]
        row = absmax[i] if absmax.dim() == 2 else absmax
        torch.testing.assert_close(row, torch.full_like(row, abs(after)), rtol=1e-2 if any(signs) else 1e-6, atol=0)


@pytest.mark.parametrize("name", ["momentum", "adam", "ademamix"])
@pytest.mark.parametrize("bits", [32, 8])
def test_opcheck(bits, name, device):
    args = inputs(bits, name, dtype=torch.bfloat16, device=device, skip_zeros=True)
    torch.library.opcheck(op(bits).default, tuple(args.values()))


def test_opcheck_with_a_bound_on_the_norm(device):
    args = inputs32("lamb", device=device, unorm_vec=torch.zeros(1, device=device), max_unorm=0.5, param_norm=2.0)
    torch.library.opcheck(op(32).default, tuple(args.values()))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("bits", [32, 8])
def test_half_precision_is_the_fp32_update_rounded_once(bits, name, dtype, device):
    args = inputs(bits, name, dtype=dtype, device=device)
    wide = copied(args) | dict(p=args["p"].to(torch.float32, copy=True), g=args["g"].float())
    actual, expected = run(bits, args), run(bits, wide)
    expected["p"] = expected["p"].to(dtype)
    assert actual["p"].dtype == dtype
    for key in actual:
        assert torch.equal(actual[key], expected[key]), key


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("bits", [32, 8])
def test_strides_never_matter(bits, name, layout, device):
    args = inputs(bits, name, shape=(3, 4, 5, 6), device=device, skip_zeros=True)
    args["g"][0] = 0
    moved = copied(args)
    for key in ("g", "p", "state1", "state2", "absmax1", "absmax2"):
        if moved.get(key) is not None and not (layout == "channels last" and moved[key].dim() != 4):
            moved[key] = LAYOUTS[layout](moved[key])
    gaps = storage_bytes(moved["p"])
    expected = run(bits, args)
    with Unchanged(moved["g"]):
        actual = run(bits, moved)
    for key in expected:
        assert torch.equal(actual[key].contiguous(), expected[key]), key
    # What lies between the elements of p stays as it was.
    moved["p"].zero_()
    left = storage_bytes(moved["p"])
    inside = left != gaps
    assert inside.sum() <= moved["p"].numel() * moved["p"].itemsize


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("bits", [32, 8])
def test_an_expanded_gradient(bits, name, device):
    one = torch.full((1,), 0.5, device=device)
    args = inputs(bits, name, device=device)
    full = copied(args) | dict(g=torch.full((9, 100), 0.5, device=device))
    args["g"] = one.expand(9, 100)
    actual, expected = run(bits, args), run(bits, full)
    assert all(torch.equal(actual[key], expected[key]) for key in expected)
    assert one.item() == 0.5


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("bits", [32, 8])
def test_empty(bits, name, device):
    args = inputs(bits, name, shape=(0, 4), device=device)
    run(bits, args)
    assert args["p"].shape == (0, 4)


@pytest.mark.parametrize("name", ["lion", "ademamix"])
@pytest.mark.parametrize("bits", [32, 8])
def test_large_tensors_are_their_parts(bits, name, device):
    """More than one span of the reference, and a short last block."""
    n = SPAN + 3 * BLOCK + 7
    args = inputs(bits, name, shape=(n,), device=device)
    cut = SPAN + BLOCK  # on a block boundary, past a span
    parts = []
    for part, blocks in ((slice(0, cut), slice(0, cut // BLOCK)), (slice(cut, n), slice(cut // BLOCK, None))):
        some = copied(args)
        for key in ("g", "p", "state1", "state2"):
            if some[key] is not None:
                some[key] = some[key][..., part].contiguous()
        for key in ("absmax1", "absmax2"):
            if some.get(key) is not None:
                some[key] = some[key][..., blocks].contiguous()
        parts.append(run(bits, some))
    whole = run(bits, args)
    for key in whole:
        assert torch.equal(whole[key], torch.cat([part[key] for part in parts], dim=-1)), key


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("bits", [32, 8])
def test_gnorm_scale_multiplies_the_gradient(bits, name, device):
    args = inputs(bits, name, device=device, gnorm_scale=0.25)
    scaled = copied(args) | dict(gnorm_scale=1.0)
    scaled["g"] *= 0.25
    actual, expected = run(bits, args), run(bits, scaled)
    assert all(torch.equal(actual[key], expected[key]) for key in expected)


# --- Bound on the norm of the update ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_long_update_is_scaled_down_to_the_bound(name, device):
    free = inputs32(name, device=device, weight_decay=0.0)
    norm = torch.zeros(1, device=device)
    bound = copied(free) | dict(unorm_vec=norm, max_unorm=0.5, param_norm=2.0)
    before = free["p"].clone()
    free_result = run(32, free)
    bound_result = run(32, bound)
    update = free_result["p"] - before
    torch.testing.assert_close(norm.item(), update.norm().item() / free["lr"], rtol=1e-4, atol=0)
    assert norm > 1.0
    torch.testing.assert_close(bound_result["p"] - before, update / norm, rtol=1e-3, atol=1e-6)
    close({k: bound_result[k] for k in free_result if k != "p"}, {k: free_result[k] for k in free_result if k != "p"})


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_short_update_is_left_alone(name, device):
    free = inputs32(name, device=device)
    norm = torch.zeros(1, device=device)
    bound = copied(free) | dict(unorm_vec=norm, max_unorm=1e6, param_norm=2.0)
    expected, actual = run(32, free), run(32, bound)
    assert actual.pop("unorm_vec") > 0
    close(actual, expected)


def test_the_norm_spans_the_whole_tensor(device):
    n = SPAN + 100
    norm = torch.zeros(1, device=device)
    args = inputs32("lion", (n,), device=device, unorm_vec=norm, max_unorm=1.0, param_norm=1.0)
    run(32, args)
    torch.testing.assert_close(norm.item(), n**0.5, rtol=1e-5, atol=0)


def test_no_norm_is_written_without_a_bound(device):
    norm = torch.full((1,), 7.0, device=device)
    run(32, inputs32("lamb", device=device, unorm_vec=norm))
    assert norm.item() == 7.0


def test_functional_computes_the_norm_of_the_parameter(device):
    args = inputs32("lars", device=device, max_unorm=0.02, unorm_vec=torch.zeros(1, device=device))
    same = copied(args) | dict(param_norm=args["p"].norm().item())
    del args["param_norm"]
    F.optimizer_update_32bit(**args)
    run(32, same)
    torch.testing.assert_close(args["p"], same["p"])
    assert args["unorm_vec"] > 0


# --- Skipping zeros ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("bits", [32, 8])
def test_skip_zeros(bits, name, step, device):
    args = inputs(bits, name, shape=(4, BLOCK), device=device, skip_zeros=True, step=step)
    args["g"][0] = 0.0  # a whole block
    args["g"][1, ::2] = -0.0
    skipped = args["g"] == 0
    before = copied(args)
    plain = copied(args) | dict(skip_zeros=False)
    result, unskipped = run(bits, args), run(bits, plain)

    assert torch.equal(result["p"][skipped], before["p"][skipped])
    torch.testing.assert_close(result["p"][~skipped], unskipped["p"][~skipped], rtol=1e-6, atol=1e-6)
    assert (result["p"] != before["p"])[~skipped].any()
    # The block without a gradient keeps its state to the bit; so do the skipped elements of 32-bit states.
    for key in ("state1", "state2"):
        if before[key] is not None:
            idle = skipped if bits == 32 else skipped.all(dim=1, keepdim=True).expand_as(skipped)
            assert torch.equal(result[key][..., idle], before[key][..., idle]), key
            assert not torch.equal(result[key], before[key]), key
    if bits == 8:
        for key in ("absmax1", "absmax2"):
            if before[key] is not None:
                assert torch.equal(result[key][..., 0], before[key][..., 0]), key


@pytest.mark.parametrize("bits", [32, 8])
def test_zeros_are_not_skipped_by_default(bits, device):
    args = inputs(bits, "adam", device=device)
    args["g"].zero_()
    before = args["p"].clone()
    assert (run(bits, args)["p"] != before).all()  # decay and momentum go on


def test_skipped_elements_do_not_count_in_the_norm(device):
    args = inputs32("lion", (10,), device=device, skip_zeros=True, max_unorm=1.0, param_norm=1.0)
    args["unorm_vec"] = torch.zeros(1, device=device)
    args["g"][:6] = 0
    torch.testing.assert_close(run(32, args)["unorm_vec"].item(), 2.0)


# --- Special values ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_bad_gradient_stays_in_its_block(name, bad, device):
    args = inputs8(name, (3 * BLOCK,), device=device)
    good = copied(args)
    args["g"][BLOCK + 1] = bad
    actual, expected = run(8, args), run(8, good)
    others = torch.ones(3 * BLOCK, dtype=torch.bool, device=device)
    others[BLOCK : 2 * BLOCK] = False
    assert torch.equal(actual["p"][others], expected["p"][others])
    for key in ("state1", "state2"):
        if args[key] is not None:
            assert torch.equal(actual[key][..., others], expected[key][..., others]), key
    assert not actual["absmax1"][..., 1].isfinite().all()


def test_zero_gradients_from_zero_states_change_nothing(device):
    for name in OPTIMIZERS:
        args = inputs8(name, device=device, weight_decay=0.0, step=1)
        for key in ("g", "absmax1", "absmax2"):
            if args[key] is not None:
                args[key].zero_()
        before = args["p"].clone()
        result = run(8, args)
        assert torch.equal(result["p"], before), name
        assert not result["absmax1"].any(), name


# --- Arguments --------------------------------------------------------------------------------------------------------


def short(t):
    return t.flatten()[1:].clone()


def double(t):
    return t.cpu().double().to(t.device)  # a cast on an NPU gives float32


BAD = [
    ("optimizer_name", lambda a: a | dict(optimizer_name="adamw"), (32, 8)),
    ("the dtype of p", lambda a: a | dict(p=double(a["p"]), g=double(a["g"])), (32, 8)),
    ("the dtype of p", lambda a: a | dict(p=a["p"].to(torch.int8), g=a["g"].to(torch.int8)), (32, 8)),
    ("the dtype of g", lambda a: a | dict(g=a["g"].half()), (32, 8)),
    ("g", lambda a: a | dict(g=short(a["g"])), (32, 8)),
    ("g", lambda a: a | dict(g=a["g"].cpu().to_sparse()), (32, 8)),
    ("step", lambda a: a | dict(step=0), (32, 8)),
    ("state1", lambda a: a | dict(state1=a["state1"].half()), (32, 8)),
    ("state1", lambda a: a | dict(state1=short(a["state1"])), (32, 8)),
    ("state2", lambda a: a | dict(state2=short(a["state2"])), (32, 8)),
    ("state2", lambda a: a | dict(state2=None), (32, 8)),
    ("unorm_vec", lambda a: a | dict(unorm_vec=a["p"].new_zeros(2)), (32,)),
    ("unorm_vec", lambda a: a | dict(unorm_vec=a["p"].new_zeros(1).half()), (32,)),
    ("qmap1", lambda a: a | dict(qmap1=a["qmap1"][:255]), (8,)),
    ("qmap2", lambda a: a | dict(qmap2=a["qmap2"].half()), (8,)),
    ("qmap2 and absmax2", lambda a: a | dict(qmap2=None), (8,)),
    ("qmap2 and absmax2", lambda a: a | dict(absmax2=None), (8,)),
    ("absmax1", lambda a: a | dict(absmax1=short(a["absmax1"])), (8,)),
    ("absmax1", lambda a: a | dict(absmax1=double(a["absmax1"])), (8,)),
    ("absmax2", lambda a: a | dict(absmax2=torch.zeros(1, device=a["p"].device)), (8,)),
    ("state1", lambda a: a | dict(state1=torch.zeros_like(a["state1"], device="meta")), (32, 8)),
]


@pytest.mark.parametrize(("argument", "spoil", "widths"), BAD)
def test_bad_arguments_are_named_and_nothing_is_written(argument, spoil, widths, device):
    for bits in widths:
        args = spoil(inputs(bits, "adam", device=device))
        with Unchanged(args["p"]), pytest.raises(ArgumentError) as error:
            op(bits)(*args.values())
        assert error.value.argument == argument


def test_the_valid_names_are_in_the_message(device):
    with pytest.raises(ArgumentError, match="momentum, lars, rmsprop, adagrad, lion, adam, lamb, ademamix"):
        op(32)(*inputs32("adam", device=device, optimizer_name="sgd").values())


@pytest.mark.parametrize("bits", [32, 8])
def test_ademamix_needs_stacked_averages(bits, device):
    args = inputs(bits, "ademamix", device=device)
    with pytest.raises(ArgumentError, match="state1"):
        op(bits)(*(args | dict(state1=args["state1"][0])).values())
    if bits == 8:
        with pytest.raises(ArgumentError, match="absmax1"):
            op(bits)(*(args | dict(absmax1=args["absmax1"].flatten())).values())


@pytest.mark.parametrize("bits", [32, 8])
def test_parameters_that_require_grad(bits, device):
    args = inputs(bits, "adam", device=device)
    expected = run(bits, copied(args))
    args["p"].requires_grad_()
    actual = run(bits, args)
    assert torch.equal(actual["p"], expected["p"])
    assert args["p"].is_leaf
