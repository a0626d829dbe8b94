"""The simulated machine: memory, devices, chips, what is refused, what is counted."""

import ctypes
import gc
import io
import pickle

import pytest
import torch

from tests.simulator.helpers import only_simulated, printed_by, run_python

pytestmark = only_simulated

MIXED = "Expected all tensors to be on the same device"


@pytest.fixture
def testing():
    from torch_npu import _testing

    return _testing


def bytes_at(testing, tensor) -> bytes:
    return ctypes.string_at(testing.host_address(tensor.data_ptr()), tensor.nbytes)


# --- Loading ----------------------------------------------------------------------------------------------------------


def test_import_torch_loads_it():
    assert printed_by("import torch; print(torch.npu.device_count(), torch.ones(2, device='npu').device)") == "2 npu:0"


def test_it_can_be_imported_before_torch():
    assert printed_by("import torch_npu; print(torch_npu.is_simulated, torch_npu.__version__)") == (
        "True 2.13.0+simulated"
    )


def test_without_autoload_there_is_no_npu():
    code = "import torch; print(hasattr(torch, 'npu'), torch.accelerator.is_available())"
    assert printed_by(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == "False False"


def test_torch_compile_is_not_imported():
    assert printed_by("import sys, torch; print('torch._dynamo' in sys.modules)") == "False"


def test_a_missing_compiler_is_named(tmp_path):
    code = (
        "import torch_npu._build as b\n"
        f"from pathlib import Path; b._BUILT = Path({str(tmp_path)!r})\n"
        "try: b.library()\nexcept RuntimeError as error: print(error)"
    )
    assert "built with g++, which is missing: apt install g++" in printed_by(code, CXX="no-such-compiler")


# --- Memory -----------------------------------------------------------------------------------------------------------


def test_host_code_that_reads_device_memory_dies():
    done = run_python("import ctypes, torch; ctypes.string_at(torch.ones(4, device='npu').data_ptr(), 4)")
    assert done.returncode == -11  # SIGSEGV


def test_fresh_memory_is_poisoned(testing):
    assert set(bytes_at(testing, torch.empty(100, device="npu"))) == {0xFF}


def test_freed_memory_is_poisoned(testing):
    tensor = torch.ones(100, device="npu")
    address = testing.host_address(tensor.data_ptr())
    del tensor
    gc.collect()
    assert set(ctypes.string_at(address, 400)) == {0xDD}


@pytest.mark.parametrize("index", [0, 1])
def test_an_address_knows_its_device(testing, index):
    assert testing.device_of_address(torch.ones(2, device=f"npu:{index}").data_ptr()) == index
    assert testing.device_of_address(torch.ones(2).data_ptr()) == -1


def test_statistics_follow_allocations():
    gc.collect()
    torch.npu.empty_cache()
    torch.npu.reset_peak_memory_stats()
    before, (free, total) = torch.npu.memory_allocated(), torch.npu.mem_get_info()
    tensor = torch.empty(1000, dtype=torch.uint8, device="npu")
    assert torch.npu.memory_allocated() == before + 1024  # blocks of 512 bytes
    del tensor
    assert torch.npu.memory_allocated() == before
    assert torch.npu.max_memory_allocated() == torch.npu.memory_reserved() == before + 1024
    assert torch.npu.mem_get_info() == (free - 1024, total)
    torch.npu.empty_cache()
    torch.npu.reset_peak_memory_stats()
    assert torch.npu.max_memory_allocated() == torch.npu.memory_reserved() == before


def test_statistics_are_kept_for_each_device():
    before = torch.npu.memory_allocated("npu:0"), torch.npu.memory_allocated(1)
    kept = torch.empty(512, dtype=torch.uint8, device="npu:1")
    assert kept.device.index == 1
    assert (torch.npu.memory_allocated("npu:0"), torch.npu.memory_allocated(1)) == (before[0], before[1] + 512)


def test_memory_ends():
    code = (
        "import torch\nkept = torch.empty(3000, device='npu')\n"
        "try: torch.empty(3000, device='npu')\nexcept torch.OutOfMemoryError as error: print(error)"
    )
    assert printed_by(code, BNB_SIMULATOR_MEMORY="20000").startswith(
        "NPU out of memory. Tried to allocate 12288 bytes (NPU 0; 20000 bytes total capacity; 12288 bytes already"
    )


def test_pinned_memory():
    assert torch.ones(3).pin_memory().is_pinned()
    assert torch.empty(3, pin_memory=True).is_pinned()
    assert not torch.ones(3).is_pinned()


def test_resizing_keeps_what_was_there():
    tensor = torch.arange(3, device="npu")
    tensor.resize_(500)
    assert tensor[:3].tolist() == [0, 1, 2]
    result = torch.empty(0, device="npu")
    torch.add(torch.ones(2, 3, device="npu"), 1, out=result)
    assert result.tolist() == [[2, 2, 2], [2, 2, 2]]


# --- Devices, streams, random numbers ---------------------------------------------------------------------------------


def test_the_current_device_decides_where_npu_is():
    with torch.npu.device(1):
        assert torch.npu.current_device() == 1
        assert torch.ones(1, device="npu").device == torch.device("npu:1")
    assert torch.npu.current_device() == 0
    with torch.npu.device_of(torch.ones(1, device="npu:1")):
        assert torch.npu.current_device() == 1
    with pytest.raises(RuntimeError, match="Invalid NPU device id 2"):
        torch.npu.set_device(2)


def test_streams_are_distinct_and_have_an_address():
    default, other = torch.npu.current_stream(), torch.npu.Stream()
    assert default == torch.npu.default_stream()
    assert default != other
    assert len({default.npu_stream, other.npu_stream, torch.npu.current_stream(1).npu_stream, 0}) == 4
    with torch.npu.stream(other):
        assert torch.npu.current_stream() == other
    assert torch.npu.current_stream() == default


def test_events_measure_time():
    first, last = (torch.npu.Event(enable_timing=True) for _ in range(2))
    first.record()
    last.record()
    last.synchronize()
    assert 0 < first.elapsed_time(last) < 1000


def test_seeds_and_generators_of_the_device():
    torch.manual_seed(5)
    numbers = torch.randn(4, device="npu")
    state = torch.npu.get_rng_state()
    more = torch.randn(4, device="npu")
    torch.npu.set_rng_state(state)
    assert torch.equal(torch.randn(4, device="npu"), more)
    torch.npu.manual_seed_all(5)
    assert torch.equal(torch.randn(4, device="npu"), numbers)
    generator = torch.Generator(device="npu").manual_seed(5)
    assert torch.equal(torch.randn(4, device="npu", generator=generator), numbers)
    with pytest.raises(RuntimeError, match="Expected a 'npu' device type for generator"):
        torch.randn(4, device="npu", generator=torch.Generator())


def test_a_forked_child_cannot_use_the_device():
    code = (
        "import os, torch\ntorch.ones(1, device='npu')\n"
        "if os.fork() == 0:\n"
        "    try: torch.ones(1, device='npu')\n"
        "    except RuntimeError as error: print(error, torch.npu._is_in_bad_fork(), flush=True)\n"
        "    os._exit(0)\n"
        "os.wait()"
    )
    printed = printed_by(code)
    assert printed.startswith("Cannot re-initialize NPU in forked subprocess") and printed.endswith("True")


# --- Chips ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chip", "version", "bf16"),
    [
        ("Ascend910A", 100, False),
        ("Ascend310P3", 202, False),
        ("Ascend910B3", 223, True),
        ("Ascend910_9391", 250, True),
        ("Ascend950", 260, True),
    ],
)
def test_chips(chip, version, bf16):
    code = (
        "import torch\nx = torch.ones(2, device='npu').bfloat16()\n"
        "print(torch.npu.get_device_name(), torch.npu.get_soc_version(), torch.npu.is_bf16_supported())\n"
        "try: print((x + x).float().tolist())\nexcept RuntimeError as error: print(error)"
    )
    first, second = printed_by(code, BNB_SIMULATOR_CHIP=chip).splitlines()
    assert first == f"{chip} {version} {bf16}"
    assert second == ("[2.0, 2.0]" if bf16 else f"aten::add is not implemented for DT_BFLOAT16 on {chip}")


def test_an_unknown_chip_fails_at_first_use():
    code = (
        "import torch; print(torch.npu.device_count())\n"
        "try: torch.ones(1, device='npu')\nexcept RuntimeError as error: print(error)"
    )
    assert printed_by(code, BNB_SIMULATOR_CHIP="Foo") == "2\nUnsupported soc version: Foo"


def test_the_number_of_devices():
    assert printed_by("import torch; print(torch.npu.device_count())", BNB_SIMULATOR_DEVICES="5") == "5"
    code = "import torch; print(torch.npu.is_available(), torch.accelerator.is_available())"
    assert printed_by(code, BNB_SIMULATOR_DEVICES="0") == "False False"


# --- What is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", ["cpu", "npu:1"])
@pytest.mark.parametrize("call", [torch.add, torch.matmul, torch.cat, torch.where], ids=lambda call: call.__name__)
def test_mixed_devices(call, other):
    a, b = torch.ones(2, 2, device="npu:0"), torch.ones(2, 2, device=other)
    with pytest.raises(RuntimeError, match=MIXED):
        call(*{torch.cat: ([a, b],), torch.where: (a > 0, a, b)}.get(call, (a, b)))


def test_what_may_be_mixed():
    a = torch.arange(4.0, device="npu")
    two = torch.tensor(2.0)
    assert (a * two).device == (two * a).device == a.device
    assert a[torch.tensor([1, 3])].tolist() == [1, 3]
    a.copy_(torch.zeros(4))
    a.copy_(torch.ones(4, device="npu:1"))
    assert a.tolist() == [1, 1, 1, 1]


def test_operators_without_a_kernel():
    a = torch.ones(32, 32, dtype=torch.int8, device="npu")
    with pytest.raises(NotImplementedError, match=r"Could not run 'aten::_int_mm'.*no kernel for the NPU"):
        torch._int_mm(a, a)
    with torch.library._scoped_library("simulator_test", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: 2 * x, "CPU")
        assert torch.ops.simulator_test.twice(torch.ones(1)).item() == 2
        with pytest.raises(NotImplementedError, match="Could not run 'simulator_test::twice'"):
            torch.ops.simulator_test.twice(a)


def test_float64():
    with pytest.warns(UserWarning, match="do not support double"):
        torch.set_warn_always(True)
        try:
            assert torch.ones(2, device="npu").double().dtype == torch.float32
        finally:
            torch.set_warn_always(False)
    assert torch.ones(2, dtype=torch.float64).npu().dtype == torch.float64


def test_numpy_needs_a_copy():
    with pytest.raises(TypeError, match="can't convert npu:0"):
        torch.ones(2, device="npu").numpy()


# --- What is counted --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("act", "expected"),
    [
        (lambda x: x + 1, {"launches": 1}),
        (lambda x: x.cpu(), {"copies_to_host": 1}),
        (lambda x: x.tolist(), {"copies_to_host": 1}),
        (lambda x: torch.ones(2).npu(), {"copies_to_device": 1}),
        (lambda x: x.clone(), {}),
        (lambda x: x.to("npu:1"), {}),
        (lambda x: x[0, 0].item(), {"items": 1}),
        (lambda x: bool(x.view(-1)[0]), {"items": 1}),
        (lambda x: torch.npu.synchronize(), {"synchronisations": 1}),
        (lambda x: torch.npu.current_stream().synchronize(), {"synchronisations": 1}),
        (lambda x: x.nonzero(), {"synchronisations": 1, "launches": 1}),
        (lambda x: x[torch.tensor([0])], {"copies_to_device": 1, "launches": 1}),
        (lambda x: torch.npu.current_stream(), {}),
        (lambda x: torch.npu.current_stream().npu_stream, {"stream_reads": 1}),
        (lambda x: torch.npu.current_stream()._as_parameter_, {"stream_reads": 1}),
        (lambda x: torch.accelerator.current_stream().native_handle, {"stream_reads": 1}),
        (lambda x: x.t().reshape(-1)[::2].view(torch.int32), {}),
    ],
)
def test_counts(act, expected, testing):
    x = torch.ones(3, 2, device="npu")
    with testing.counting() as counts:
        act(x)
    names = ("copies_to_host", "copies_to_device", "items", "synchronisations", "stream_reads", "launches")
    assert {name: getattr(counts, name) for name in names if getattr(counts, name)} == expected
    assert counts.waits == sum(expected.get(name, 0) for name in names[:4])


def test_operators_are_named(testing):
    x = torch.ones(3, device="npu")
    with testing.counting() as counts:
        x.mul_(2)
        torch.histc(x)
        torch.ops.npu.npu_rms_norm(x, x)
    assert counts.ops == {"aten::mul.out": 1, "aten::histc": 1, "npu::npu_rms_norm": 1}


# --- What PyTorch does on a device ------------------------------------------------------------------------------------


def test_training_equals_the_cpu():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(2, 4, 3), torch.nn.GELU(), torch.nn.Flatten(), torch.nn.LayerNorm(64), torch.nn.Linear(64, 3)
    )
    copy = pickle.loads(pickle.dumps(model)).npu()
    x = torch.randn(5, 2, 6, 6)
    for m, device in ((model, "cpu"), (copy, "npu")):
        optimizer = torch.optim.AdamW(m.parameters(), lr=0.01)
        for _ in range(3):
            m(x.to(device)).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(model.parameters(), copy.parameters(), strict=True):
        assert q.device.type == "npu"
        torch.testing.assert_close(q.cpu(), p)


@pytest.mark.parametrize("where", [None, "cpu", "npu:1"])
def test_saving_and_loading(where):
    file = io.BytesIO()
    torch.save({"x": torch.arange(5, device="npu:0")}, file)
    file.seek(0)
    loaded = torch.load(file, map_location=where)["x"]
    assert loaded.device == torch.device(where or "npu:0")
    assert loaded.tolist() == [0, 1, 2, 3, 4]


def test_the_data_of_a_parameter_can_move():
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.data = torch.zeros(3, device="npu")
    assert parameter.device.type == "npu"
    assert parameter.npu() is parameter
    assert torch.nn.Linear(2, 2).npu().weight.is_npu


def test_autocast():
    x = torch.ones(4, 4, device="npu")
    with torch.autocast("npu", dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
        assert (x @ x).softmax(-1).dtype == torch.float32
    assert torch.npu.amp.GradScaler(init_scale=8.0).scale(x)[0, 0].item() == 8


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile(backend):
    torch._dynamo.reset()
    x = torch.ones(4, device="npu:1")
    assert torch.compile(lambda x: torch.sin(x) + 1, backend=backend, fullgraph=True)(x).device == x.device


def test_integers_can_be_counted():
    assert torch.histc(torch.arange(10, device="npu"), bins=5, min=0, max=9).tolist() == [2, 2, 2, 2, 2]


def test_the_accelerator_is_the_npu():
    assert torch.accelerator.current_accelerator() == torch.device("npu")
    assert torch.accelerator.device_count() == 2
    assert torch.accelerator.memory_allocated() == torch.npu.memory_allocated()
