"""The device gates of other libraries: they refuse NPUs, and `bitsandbytes.integrations` opens them."""

import functools
import os
from pathlib import Path
import subprocess
import sys
from types import SimpleNamespace

import pytest

from bitsandbytes.errors import UnsupportedError
from bitsandbytes.integrations import _gates

from .models import DEVICE

pytestmark = pytest.mark.integration

# The mechanism, on a library made for it


def _accelerator(present: bool) -> SimpleNamespace:
    return SimpleNamespace(is_available=lambda: present, current_device=lambda: 3)


torch = SimpleNamespace(cuda=_accelerator(False), xpu=_accelerator(False), npu=_accelerator(True))


def decorated(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


def new_library(decorate=lambda function: function):
    @decorate
    def pick(inputs=("cuda", "xpu"), *, prefix=""):
        """Docstrings may say npu."""
        if torch.xpu.is_available():
            return prefix + f"xpu:{torch.xpu.current_device()}", inputs, "xpu" in ("cuda", "xpu")
        raise RuntimeError("No GPU found")

    return SimpleNamespace(pick=pick)


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """An NPU, and version 1.2.3 of every library."""
    monkeypatch.setattr(_gates, "_npu_is_present", lambda: True)
    monkeypatch.setattr(_gates, "version", lambda library: "1.2.3")


@pytest.mark.parametrize("decorate", [lambda function: function, decorated], ids=["plain", "decorated"])
def test_a_gate_opens_and_stays_the_same_function(decorate):
    library = new_library(decorate)
    imported_before = library.pick
    with pytest.raises(RuntimeError, match="No GPU found"):
        library.pick()
    for _ in range(2):
        _gates.open_gates("library", ("1.1", "1.2"), [(library, "pick")])
        assert library.pick is imported_before
        assert imported_before(prefix="on ") == ("on npu:3", ("cuda", "xpu"), True)


def test_an_unknown_version_is_refused_with_the_known_ones():
    library = new_library()
    with pytest.raises(UnsupportedError, match=r"library 1\.2\.3 .* pick.* known versions of library are 1\.1, 1\.3"):
        _gates.open_gates("library", ("1.1", "1.3"), [(library, "pick")])
    with pytest.raises(RuntimeError, match="No GPU found"):
        library.pick()


def test_an_unknown_version_without_the_function_is_refused():
    with pytest.raises(UnsupportedError, match="gone"):
        _gates.open_gates("library", ("1.1",), [(SimpleNamespace(), "gone")])


def test_a_library_that_accepts_npus_is_left_alone_whatever_its_version():
    def pick():
        return "xpu" if torch.xpu.is_available() else "npu"

    library, code = SimpleNamespace(pick=pick), pick.__code__
    _gates.open_gates("library", (), [(library, "pick")])
    assert pick.__code__ is code


def test_without_an_npu_nothing_changes(monkeypatch):
    monkeypatch.setattr(_gates, "_npu_is_present", lambda: False)
    library = new_library()
    code = library.pick.__code__
    _gates.open_gates("library", ("1.2",), [(library, "pick")])
    assert library.pick.__code__ is code


# The libraries themselves. Opening lasts for the process, so these tests have their own.

GATES = {
    "diffusers": """
from diffusers import BitsAndBytesConfig
from diffusers.quantizers.auto import DiffusersAutoQuantizer
quantizers = [DiffusersAutoQuantizer.from_config(BitsAndBytesConfig(**{f"load_in_{bits}bit": True})) for bits in (4, 8)]
gates = [
    *(q.validate_environment for q in quantizers),
    *(lambda q=q: torch.empty(1, device=q.update_device_map(None)[""]) for q in quantizers),
]
""",
    "accelerate": """
from accelerate.utils import BnbQuantizationConfig, load_and_quantize_model
gates = [
    lambda bits=bits: load_and_quantize_model(
        torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)),
        BnbQuantizationConfig(**{f"load_in_{bits}bit": True}, skip_modules=["1"])
    )
    for bits in (4, 8)
]
""",
    "peft": """
from peft.tuners.lora.layer import loftq_init
gates = [lambda bits=bits: loftq_init(torch.randn(64, 64), num_bits=bits, reduced_rank=4) for bits in (4, 8)]
""",
}
SCRIPT = """
import torch
{gates}
def refused(gate):
    try:
        gate()
    except (RuntimeError, AssertionError) as error:  # AssertionError: "Torch not compiled with CUDA enabled"
        return str(error)
    return ""
before = [refused(gate) for gate in gates]
assert all("GPU" in message or "CUDA" in message for message in before), before
import bitsandbytes.integrations.{library}
for gate in gates:
    gate()
"""


@pytest.mark.slow
@pytest.mark.skipif(DEVICE.type != "npu", reason="opens gates for NPUs")
@pytest.mark.parametrize("library", ["diffusers", "accelerate", "peft"])
def test_a_library_refuses_before_and_works_after(library):
    pytest.importorskip(library)
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    script = "import torch_npu\n" + SCRIPT.format(gates=GATES[library], library=library)
    result = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
