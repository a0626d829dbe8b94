"""How many threads the native CPU kernels start: PyTorch's number at most, none for small inputs."""

import os
from pathlib import Path
import subprocess
import sys

import pytest

from bitsandbytes import backends

pytestmark = [
    pytest.mark.skipif(not backends.status()["cpu"][0], reason="there is no native CPU library here"),
    pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc"),
]

COUNT = """
import os, torch
import bitsandbytes.functional as F
torch.set_num_threads({threads})
x = torch.empty({size})  # uninitialised: filling it would start threads
count = lambda: len(os.listdir("/proc/self/task"))
before = count()
F.quantize_4bit(x), F.quantize_blockwise(x), F.int8_vectorwise_quant(x.view(-1, 64))
kernels = count() - before
x.exp_()
print(kernels, count() - before)
"""


def started(threads: int, size: int) -> list[int]:
    """Threads that a process has more after calls of kernels, and after an operator of PyTorch that follows."""
    result = subprocess.run(
        [sys.executable, "-c", COUNT.format(threads=threads, size=size)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return [int(count) for count in result.stdout.split()]


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_large_inputs_use_the_threads_of_pytorch(threads):
    """As many as PyTorch has, and the same: its own operators need no others."""
    assert started(threads, 1 << 22) == [threads - 1, threads - 1]


def test_small_inputs_stay_on_the_calling_thread():
    assert started(4, 1 << 12)[0] == 0
