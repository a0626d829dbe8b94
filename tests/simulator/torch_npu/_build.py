"""Builds the C++ part once for each state of its sources and each version of PyTorch."""

from concurrent.futures import ThreadPoolExecutor
import fcntl
import hashlib
import os
from pathlib import Path
import shutil
import subprocess

import torch

_SOURCES = Path(__file__).parent / "csrc"
_BUILT = Path(__file__).parents[3] / "build" / "simulator"
_TORCH = Path(torch.__file__).parent
_OPTIONS = ("-std=c++20", "-O1", "-fPIC", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}")
_INCLUDES = ("-isystem", _TORCH / "include", "-isystem", _TORCH / "include/torch/csrc/api/include")
_LINK = (f"-L{_TORCH / 'lib'}", f"-Wl,-rpath,{_TORCH / 'lib'}", "-ltorch_cpu", "-lc10")


def library() -> Path:
    """The shared library, built if it is not there yet."""
    state = _hash(*sorted(_SOURCES.iterdir()))
    path = _BUILT / state / "libsimulator.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with (_BUILT / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                _build(path)
    return path


def _hash(*files: Path) -> str:
    state = hashlib.sha256(repr((torch.__version__, torch.__file__, _OPTIONS)).encode())
    for file in files:
        state.update(file.name.encode() + file.read_bytes())
    return state.hexdigest()[:16]


def _build(path: Path) -> None:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise RuntimeError(
            "The simulated NPU (tests/simulator) is built with g++, which is missing: apt install g++, or set CXX. "
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0 imports torch without it."
        )

    def compile(source: Path) -> Path:
        built = _BUILT / "objects" / f"{source.stem}-{_hash(source, *sorted(_SOURCES.glob('*.h')))}.o"
        if not built.exists():
            _run(built, compiler, *_OPTIONS, *_INCLUDES, "-c", source)
        return built

    # The one that takes longest first.
    sources = sorted(_SOURCES.glob("*.cpp"), key=lambda source: source.name != "autocast.cpp")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile, sources))
    _run(path, compiler, "-shared", *objects, *_LINK)


def _run(output: Path, *command: object) -> None:
    """Write `output` whole or not at all."""
    output.parent.mkdir(parents=True, exist_ok=True)
    unfinished = output.with_suffix(".unfinished")
    done = subprocess.run([*map(str, command), "-o", str(unfinished)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"The simulated NPU cannot be built: {' '.join(done.args)}\n{done.stderr}")
    unfinished.rename(output)
