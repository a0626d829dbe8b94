"""The NPU backend: when it is there, chips, tiers and their choice, and launching."""

import os
from pathlib import Path
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from bitsandbytes import _ops, backends
from bitsandbytes import functional as F
from bitsandbytes.errors import NativeError, UnsupportedError
from tests.helpers import assert_same, devices, overload, randint, reference

ROOT = Path(__file__).parents[2]

on_npu = pytest.mark.skipif(
    not any(device.startswith("npu") for device in devices()), reason="runs with BNB_TEST_DEVICE=npu:0"
)

# --- Without a device -------------------------------------------------------------------------------------------------


def python(code: str, path: Path | None = None) -> str:
    """The output of `code` in a Python of its own that does not load a torch_npu by itself."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(str(p) for p in (path, ROOT) if p),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


STATUS = "import bitsandbytes; print(bitsandbytes.backends.status()['npu'])"


@pytest.mark.skipif(bool(_ops.implementations["gemm_4bit"]["PrivateUse1"] == "npu"), reason="torch_npu is installed")
def test_without_torch_npu_the_reason_is_that():
    assert python(STATUS) == "(False, 'torch_npu is not installed')"
    loaded = (
        "import sys, bitsandbytes; print([m for m in sys.modules if 'npu' in m and m != 'bitsandbytes.backends.npu'])"
    )
    assert python(loaded) == "[]"


@pytest.fixture
def fake(tmp_path):
    """A torch_npu that has been installed and does nothing."""

    def install(source: str) -> Path:
        (tmp_path / "torch_npu.py").write_text(source)
        return tmp_path

    return install


def test_a_torch_npu_that_nobody_imported(fake):
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in python(STATUS, fake("raise ImportError('no libascendcl.so')"))


def test_a_machine_without_a_device(fake):
    path = fake("")
    no_device = (
        "import torch, torch_npu; from types import SimpleNamespace as S; torch.npu = S(device_count=lambda: 0); "
    )
    assert python(no_device + STATUS, path) == "(False, 'torch_npu finds no NPU')"


def test_importing_asks_the_device_nothing(fake):
    """Every attribute of the device module raises."""
    code = "import torch, torch_npu; torch.npu = object(); import bitsandbytes; print('imported')"
    assert python(code, fake("")) == "imported"


# --- Chips ------------------------------------------------------------------------------------------------------------

CHIPS = (
    (100, "Ascend910PremiumA", "910A", False),
    (104, "Ascend910B", "910A", False),  # an early chip, not the Ascend910B1 to B4 of today
    (202, "Ascend310P3", "310P", False),
    (220, "Ascend910B1", "A2", True),
    (225, "Ascend910B4-1", "A2", True),
    (242, "Ascend310B3", "310B", False),
    (250, "Ascend910_9391", "A3", True),
    (256, "Ascend910_9363", "A3", True),
    (260, "Ascend950PR_9599", "950", True),
)


@pytest.fixture
def on_chip(monkeypatch):
    """Makes the process believe that it runs on a chip."""
    npu = pytest.importorskip("bitsandbytes.backends.npu", reason="torch_npu is not installed", exc_type=RuntimeError)
    device_module = torch.npu

    def pretend(version: int, name: str, bf16: bool = True):
        answers = {
            "get_soc_version": lambda: version,
            "get_device_name": lambda *device: name,
            "is_bf16_supported": lambda: bf16,
        }
        for attribute, answer in answers.items():
            monkeypatch.setattr(device_module, attribute, answer)
        forget()
        return npu

    def forget():
        npu.chip.cache_clear()
        npu._tiers._set_forced(npu._tiers._forced)

    yield pretend
    monkeypatch.undo()
    forget()


@on_npu
@pytest.mark.parametrize(("version", "name", "family", "bf16"), CHIPS, ids=lambda value: str(value))
def test_chips(on_chip, version, name, family, bf16):
    npu = on_chip(version, name)
    assert npu.chip() == npu.Chip(name, family, bf16)
    assert (torch.bfloat16 in npu.chip().dtypes) == bf16


@on_npu
@pytest.mark.parametrize("bf16", [False, True])
def test_an_unknown_chip_runs_the_reference(on_chip, bf16):
    npu = on_chip(999, "Ascend999X", bf16)
    assert npu.chip() == npu.Chip("Ascend999X", "unknown", bf16)
    codes = torch.zeros((2, 64), dtype=torch.int8)
    choice = npu.explain("int8_linear_matmul", codes, codes)
    assert choice.tier == "default"
    assert choice.refused == {
        "torch_npu": "it is for chips of the families A2, A3; the family of Ascend999X is unknown"
    }
    assert "Ascend999X" in str(choice)
    assert "not torch_npu" in str(choice)


@on_npu
def test_bfloat16_on_a_chip_without_it(on_chip):
    npu = on_chip(202, "Ascend310P3")
    x = torch.zeros((4, 64), dtype=torch.bfloat16, device="npu")
    names_both = "Ascend310P3 has no bfloat16; use torch.float16"
    with pytest.raises(UnsupportedError, match=f"quantize_4bit: {names_both}"):
        F.quantize_4bit(x)
    with pytest.raises(UnsupportedError, match=f"quantize_blockwise: {names_both}"):
        F.quantize_blockwise(x)
    with pytest.raises(UnsupportedError, match=f"int8_vectorwise_quant: {names_both}"):
        F.int8_vectorwise_quant(x)
    packed, state = F.quantize_4bit(x.half())
    state.dtype = torch.bfloat16  # as in a checkpoint from another chip
    with pytest.raises(UnsupportedError, match=f"dequantize_4bit: {names_both}"):
        F.dequantize_4bit(packed, state)
    assert torch.float32 in npu.chip().dtypes
    F.quantize_4bit(x.float())


# --- Tiers ------------------------------------------------------------------------------------------------------------


@on_npu
def test_every_operator_has_tiers_in_order():
    from bitsandbytes.backends import npu

    assert set(npu.implementations) == set(_ops.operators())
    for op, candidates in npu.implementations.items():
        tiers = [candidate.tier for candidate in candidates]
        assert tiers == sorted(tiers, key=npu._tiers.TIERS.index)
        assert tiers[-1] == "default", op
        assert candidates[-1].supports == npu._tiers.Support(), op
        assert _ops.implementations[op]["PrivateUse1"] == "npu"


@on_npu
def test_what_explain_says_is_what_runs(on_chip, monkeypatch):
    from bitsandbytes.backends.npu import _tiers

    npu = on_chip(223, "Ascend910B3")
    ran = []
    device = devices()[0]

    def spy(tier):
        return lambda A, B: (ran.append(tier), reference("int8_linear_matmul")(A, B))[1]

    wide = _tiers.Support(families=("A2",), dtypes=(torch.int8,), ranks=range(2, 4))
    candidates = [
        _tiers.Implementation("ascendc", spy("ascendc"), _tiers.Support(ranks=range(3, 4))),
        _tiers.Implementation("torch_npu", spy("torch_npu"), wide),
        _tiers.Implementation("default", spy("default")),
    ]
    monkeypatch.setitem(npu.implementations, "int8_linear_matmul", candidates)
    weight = randint(-127, 128, (5, 64), device=device)
    for shape, tier in (((2, 3, 64), "ascendc"), ((3, 64), "torch_npu"), ((64,), "default"), ((3, 64), "torch_npu")):
        A = randint(-127, 128, shape, device=device)
        choice = npu.explain("int8_linear_matmul", A, weight)
        assert choice.tier == tier
        assert all(choice.refused.values())
        torch.ops.bitsandbytes.int8_linear_matmul(A, weight)
        assert ran.pop() == tier
        assert not ran
    assert npu.explain("int8_linear_matmul", randint(-1, 1, (64,)), weight).refused == {
        "ascendc": "it takes the rank 3, not 1",
        "torch_npu": "it takes the rank 2, 3, not 1",
    }


@on_npu
def test_explain_reads_block_sizes_and_dtypes_wherever_they_are(on_chip, monkeypatch):
    from bitsandbytes.backends.npu import _tiers

    npu = on_chip(223, "Ascend910B3")
    narrow = _tiers.Support(blocksizes=(64, 128), out_dtypes=(torch.float16,))
    nothing = _tiers.Implementation("ascendc", lambda *args: None, narrow)
    monkeypatch.setitem(npu.implementations, "dequantize_4bit", [nothing, *npu.implementations["dequantize_4bit"]])
    args = torch.zeros((32, 1), dtype=torch.uint8), torch.ones(1)
    rest = {"quant_type": "nf4", "shape": [64]}
    assert npu.explain("dequantize_4bit", *args, 64, dtype=torch.float16, **rest).tier == "ascendc"
    refused = npu.explain("dequantize_4bit", *args, 64, dtype=torch.float32, **rest).refused
    assert refused == {"ascendc": "it takes the result dtype float16, not float32"}
    refused = npu.explain("dequantize_4bit", *args, blocksize=256, dtype=torch.float16, **rest).refused
    assert refused == {"ascendc": "it takes the block size 64, 128, not 256"}


@on_npu
def test_forcing_a_tier(on_chip):
    npu = on_chip(223, "Ascend910B3")
    codes = torch.zeros((2, 64), dtype=torch.int8)
    x = torch.zeros((2, 64))
    tier = lambda: npu.explain("int8_linear_matmul", codes, codes).tier  # noqa: E731
    assert tier() == "torch_npu"
    for tiers, wanted in (
        ("default", "default"),
        ("torch_npu", "torch_npu"),
        ("int8_linear_matmul=default", "default"),
        ("default, int8_linear_matmul=torch_npu", "torch_npu"),
        ("torch_npu,int8_linear_matmul=default", "default"),
        ("", "torch_npu"),
    ):
        with npu.forced(tiers):
            assert tier() == wanted
            assert npu.explain("int8_vectorwise_quant", x).tier == "default"  # it has no other
    assert tier() == "torch_npu"


@on_npu
def test_a_forced_tier_that_refuses_is_an_error(on_chip):
    npu = on_chip(202, "Ascend310P3")
    codes = torch.zeros((2, 64), dtype=torch.int8, device="npu")
    with (
        npu.forced("torch_npu"),
        pytest.raises(UnsupportedError, match="asks for 'torch_npu', which refuses: it is for"),
    ):
        torch.ops.bitsandbytes.int8_linear_matmul(codes, codes)
    with (
        npu.forced("gemm_4bit=ascendc"),
        pytest.raises(UnsupportedError, match="'ascendc', which refuses: the operator does not have it"),
    ):
        npu.explain("gemm_4bit", torch.zeros(64), codes, [1, 64], codes, 64, "nf4")
    for bad, why in (
        ("fast", "one of ascendc, torch_npu, default, got 'fast'"),
        ("igemm=default", "no operator 'igemm'"),
    ):
        with pytest.raises(UnsupportedError, match=why), npu.forced(bad):
            pass
    with pytest.raises(UnsupportedError, match="there is no operator 'igemm'"):
        npu.explain("igemm")
    assert torch.ops.bitsandbytes.int8_linear_matmul(codes, codes).shape == (2, 2)


def test_the_variable_is_read_at_the_first_call(fake, monkeypatch):
    """A typing error in it must not keep the package from being imported."""
    code = (
        "import torch, torch_npu, bitsandbytes\n"
        "from bitsandbytes.backends import npu\n"
        "from types import SimpleNamespace as S\n"
        "torch.npu = S(get_soc_version=lambda: 223, get_device_name=lambda: 'Ascend910B3')\n"
        "try: npu.explain('int8_vectorwise_quant', torch.zeros(2, 2))\n"
        "except bitsandbytes.errors.UnsupportedError as error: print(error)"
    )
    monkeypatch.setenv("BNB_NPU_IMPL", "fastest")
    assert "got 'fastest'" in python(code, fake(""))


# --- The vendor's operators -------------------------------------------------------------------------------------------


@on_npu
@pytest.mark.parametrize("columns", [1, 1023, 1024, 1025, 3000])
def test_int8_matmul_of_torch_npu_is_exact(on_chip, columns):
    npu = on_chip(223, "Ascend910B3")
    device = devices()[0]
    for shape in ((7, columns), (2, 3, columns), (0, columns)):
        A, B = randint(-128, 128, shape, seed=1), randint(-128, 128, (5, columns), seed=2)
        wanted = (A.long() @ B.long().t()).int()
        with npu.forced("torch_npu"):
            assert npu.explain("int8_linear_matmul", A, B).tier == "torch_npu"
            assert_same(torch.ops.bitsandbytes.int8_linear_matmul(A.to(device), B.to(device)), wanted.to(device))
            out = torch.empty_like(wanted, device=device)
            overload("int8_linear_matmul.out")(A.to(device), B.to(device), out)
            assert_same(out, wanted.to(device))


@on_npu
def test_int8_matmul_of_torch_npu_with_more_rows_of_the_weight_than_it_takes(on_chip):
    npu = on_chip(223, "Ascend910B3")
    device = devices()[0]
    A, B = randint(-128, 128, (2, 8), seed=1), randint(-128, 128, (70000, 8), seed=2)
    with npu.forced("torch_npu"):
        result = torch.ops.bitsandbytes.int8_linear_matmul(A.to(device), B.to(device))
    assert_same(result.cpu(), (A.long() @ B.long().t()).int())


# --- Launching --------------------------------------------------------------------------------------------------------


@on_npu
def test_a_launch_reads_the_stream_once_and_last(on_chip):
    from torch_npu import _testing as simulator

    from bitsandbytes.backends.npu.launch import launch

    on_chip(223, "Ascend910B3")
    seen = []

    def function(stream, *args):
        seen.append((stream, torch.npu.current_device(), args))
        return 0

    for index in range(torch.npu.device_count()):
        device = torch.device("npu", index)
        side = torch.npu.Stream(device)
        before = torch.npu.current_device()
        for stream in (torch.npu.current_stream(device), side):
            handle = stream.npu_stream
            with torch.npu.stream(stream), simulator.counting() as counts:
                launch("op", function, device, 1, 2)
            assert counts.stream_reads == 1
            assert seen.pop() == (handle, index, (1, 2))
        assert torch.npu.current_device() == before


@on_npu
def test_a_launch_refuses_a_stream_that_is_gone_and_reports_failures(on_chip, monkeypatch):
    from bitsandbytes.backends.npu.launch import launch

    on_chip(223, "Ascend910B3")
    device = torch.device(devices()[0])
    with pytest.raises(NativeError, match="gemm_4bit: an argument is invalid"):
        launch("gemm_4bit", lambda stream: 1, device)
    monkeypatch.setattr(torch.npu, "current_stream", lambda device: SimpleNamespace(npu_stream=0))
    with pytest.raises(NativeError, match=r"gemm_4bit: npu:[01] has no stream any more"):
        launch("gemm_4bit", lambda stream: 0, device)


@on_npu
def test_the_status_and_the_command_name_the_chip(on_chip):
    from bitsandbytes.cli import info

    on_chip(202, "Ascend310P3")
    assert backends.status()["npu"] == (True, "")
    report = info.npu_chip()
    assert (report["name"], report["family"], report["dtypes"]) == ("Ascend310P3", "310P", ["float32", "float16"])
    assert info.operators("npu")["int8_linear_matmul"].startswith("default; not torch_npu: it is for chips of")
    assert info.operators("npu")["gemm_4bit"] == "default"
