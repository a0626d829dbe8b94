"""The CPU's native library: which instruction set runs, and what happens where there is no library."""

import json
import os
from pathlib import Path
import shutil
import subprocess
import sys

import pytest
import torch

import bitsandbytes
from bitsandbytes import backends, formats
from bitsandbytes._ops import implementations
from bitsandbytes.errors import UnsupportedError

PACKAGE = Path(bitsandbytes.__file__).parent
LIBRARY = "libbitsandbytes_cpu.so"

if not backends.status()["cpu"][0]:
    pytest.skip(backends.status()["cpu"][1], allow_module_level=True)

from bitsandbytes.backends import cpu  # noqa: E402
from bitsandbytes.backends.cpu import _library  # noqa: E402

USE = """
import torch, bitsandbytes
packed, absmax = torch.ops.bitsandbytes.quantize_4bit(torch.ones(64), 64, "nf4", torch.uint8)
assert (packed == 255).all() and absmax == 1
"""


def run(root: Path, *args: str, target: str | None = None) -> subprocess.CompletedProcess:
    """Run Python on the package in `root`."""
    environment = {**os.environ, "PYTHONPATH": str(root), "BNB_CPU_TARGET": target or ""}
    return subprocess.run(
        [sys.executable, *args], env=environment, cwd=root, capture_output=True, text=True, timeout=300
    )


@pytest.fixture
def without_library(tmp_path) -> Path:
    """A folder with a copy of the package that has no library."""
    shutil.copytree(
        PACKAGE, tmp_path / "bitsandbytes", ignore=shutil.ignore_patterns("*.so", "*.not-built.txt", "__pycache__")
    )
    return tmp_path


@pytest.mark.parametrize("quant_type", formats.CODEBOOKS)
def test_the_library_has_the_levels_of_the_formats(quant_type):
    levels = torch.empty(16)
    assert _library._library.bnb_cpu_codebook(_library.QUANT_TYPE[quant_type], levels.data_ptr()) == 0
    expected = torch.tensor(formats.CODEBOOKS[quant_type], dtype=torch.float32)
    assert torch.equal(levels.view(torch.int32), expected.view(torch.int32))


def test_every_machine_has_the_scalar_instructions_last():
    assert cpu.targets()[-1] == "scalar"
    assert len(set(cpu.targets())) == len(cpu.targets())


@pytest.mark.parametrize("name", cpu.targets())
def test_the_instructions_that_the_environment_names_are_those_that_run(name):
    code = USE + "from bitsandbytes.backends import cpu\nprint(cpu.target(), cpu.last_target())"
    done = run(PACKAGE.parent, "-c", code, target=name)
    assert (done.stdout.split(), done.stderr) == ([name, name], "")


@pytest.mark.parametrize("name", ["doesnotexist", "AVX2", "avx2" if "neon" in cpu.targets() else "neon"])
def test_instructions_that_this_machine_lacks_are_an_error_that_names_those_it_has(name):
    done = run(PACKAGE.parent, "-c", "import bitsandbytes", target=name)
    assert done.returncode == 1
    cause = done.stderr.splitlines()[-1]
    assert all(part in cause for part in ("UnsupportedError", f"'{name}'", *cpu.targets()))

    before = cpu.target()
    with pytest.raises(UnsupportedError, match=name):
        cpu.select_target(name)
    assert cpu.target() == before


def test_the_choice_holds_within_its_context():
    before = cpu.target()
    for name in cpu.targets():
        with cpu.using_target(name):
            assert cpu.target() == name
    assert cpu.target() == before


def test_info_shows_what_runs():
    done = run(PACKAGE.parent, "-m", "bitsandbytes", target="scalar")
    assert done.returncode == 0, done.stdout
    assert str(PACKAGE / LIBRARY) in done.stdout
    assert "scalar, chosen by BNB_CPU_TARGET" in done.stdout
    assert ", ".join(cpu.targets()) in done.stdout
    native = [op for op, by_key in implementations.items() if by_key.get("CPU") == "native"]
    operators = done.stdout.partition("Operators on cpu")[2].partition("Self-test")[0]
    assert native
    assert [line.split()[0] for line in operators.splitlines() if line.endswith(" native")] == sorted(native)


NO_LIBRARY = {
    "not built": (None, None, "was not built"),
    "not built, for a reason": (None, "no compiler here\n", "no compiler here"),
    "not a library": (b"hello", None, "does not load"),
    "another library": ((Path(torch.__file__).parent / "lib/libtorch_global_deps.so").read_bytes(), None, "bnb_cpu_"),
}


@pytest.mark.parametrize("name", NO_LIBRARY)
def test_without_a_library_the_reference_runs_and_info_says_why(without_library, name):
    content, reason, why = NO_LIBRARY[name]
    if content is not None:
        (without_library / "bitsandbytes" / LIBRARY).write_bytes(content)
    if reason is not None:
        (without_library / "bitsandbytes/libbitsandbytes_cpu.not-built.txt").write_text(reason)
    done = run(without_library, "-W", "error", "-m", "bitsandbytes", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["healthy"] and found["native_cpu"] is None
    assert set(found["operators"]["cpu"].values()) == {"default"}
    status = found["backends"]["cpu"]
    assert not status["available"]
    assert LIBRARY in status["why_not"] and why in status["why_not"]


def test_instructions_asked_for_are_never_replaced_by_the_reference(without_library):
    done = run(without_library, "-c", "import bitsandbytes", target="scalar")
    assert done.returncode == 1
    assert "BNB_CPU_TARGET is 'scalar'" in done.stderr and "was not built" in done.stderr
