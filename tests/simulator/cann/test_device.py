"""Devices, copies and streams of the real torch_npu: what the package relies on, and how little the stub must do."""

from contextlib import contextmanager

import pytest
import torch

from tests.simulator.cann.wheel import calls, fresh, hold_copies, release_copies

DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
)
# Name, torch_npu's number, bf16. One of each family that differs in what it computes.
CHIPS = (
    ("Ascend910A", 102, False),
    ("Ascend310P3", 202, False),
    ("Ascend910B3", 223, True),
    ("Ascend910_9391", 250, True),
    ("Ascend950PR_9599", 260, True),
)


def test_devices():
    assert torch.npu.is_available()
    assert torch.npu.device_count() == 2
    assert torch.zeros(1, device="npu:1").device == torch.device("npu", 1)


@pytest.mark.parametrize("name, number, bf16", CHIPS)
def test_the_chip_is_known_by_the_name_that_the_driver_gives(name, number, bf16):
    code = """
import torch, torch_npu
torch.npu.init()
print(torch.npu.get_device_name(0), torch_npu.npu.utils.get_soc_version(), torch.npu.is_bf16_supported())
"""
    run = fresh("-c", code, BNB_STUB_SOC=name)
    assert run.stdout.splitlines()[-1:] == [f"{name} {number} {bf16}"], run.stderr


def test_an_unknown_chip_is_refused():
    run = fresh("-c", "import torch, torch_npu; torch.npu.init()", BNB_STUB_SOC="Ascend1")
    assert run.returncode == 1
    assert "Unsupported soc version: Ascend1" in run.stderr


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copies_keep_every_value(dtype):
    values = torch.arange(-3, 300).to(dtype)
    assert torch.equal(values.to("npu:0").cpu(), values)
    assert torch.equal(values.to("npu:0").to("npu:1").cpu(), values)


def test_float64_can_be_moved_but_a_cast_to_it_gives_float32():
    assert torch.ones(2, dtype=torch.float64).to("npu").dtype is torch.float64
    assert torch.ones(2, device="npu").double().dtype is torch.float32


# --- Streams ---


@contextmanager
def queued_copy(hold_ms: int):
    """A copy to the device that is queued, but held for `hold_ms`; gives the number of copies finished since."""
    host, target = torch.ones(4).pin_memory(), torch.zeros(4, device="npu:0")
    torch.npu.synchronize()
    before = calls("aclrtMemcpyAsync")
    hold_copies(hold_ms)
    try:
        target.copy_(host, non_blocking=True)
        yield lambda: calls("aclrtMemcpyAsync") - before
    finally:
        release_copies()
    torch.npu.synchronize()
    assert calls("aclrtMemcpyAsync") == before + 1
    assert torch.equal(target.cpu(), host)


def test_a_pointer_does_not_wait_for_the_queue():
    with queued_copy(hold_ms=60_000) as finished:
        assert torch.zeros(4, device="npu:0").data_ptr()
        assert torch.npu.current_stream(0).stream_id is not None
        assert finished() == 0


def test_reading_the_stream_waits_for_what_is_queued():
    """So it is the last thing to ask for before a launch of our own, and not to be asked for twice."""
    with queued_copy(hold_ms=200) as finished:
        assert torch.npu.current_stream(0).npu_stream
        assert finished() == 1


def test_every_device_and_every_stream_context_has_a_stream_of_its_own():
    torch.zeros(1, device="npu:0"), torch.zeros(1, device="npu:1")
    first, second = (torch.npu.current_stream(device).npu_stream for device in (0, 1))
    assert 0 not in (first, second)
    assert first != second
    side = torch.npu.Stream(0)
    with torch.npu.stream(side):
        assert torch.npu.current_stream(0).npu_stream == side.npu_stream != first
        assert torch.npu.current_stream(1).npu_stream == second
    assert torch.npu.current_stream(0).npu_stream == first


def test_a_device_that_was_not_used_has_no_stream_until_it_is_the_current_one():
    code = """
import torch, torch_npu
torch.zeros(1, device="npu:0")
try:
    torch.npu.current_stream(1)
except RuntimeError as error:
    assert "Uninitialized default NPU stream" in str(error), error
else:
    raise AssertionError("no error")
with torch.npu.device(1):
    assert torch.npu.current_stream(1).npu_stream
"""
    run = fresh("-c", code)
    assert run.returncode == 0, run.stderr
