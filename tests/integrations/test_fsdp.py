"""FSDP2 with two processes: packed weights in a floating storage dtype shard, gather and train unchanged.

On an accelerator each process has a device of its own.
"""

import os
from pathlib import Path
import socket
import subprocess
import sys

import pytest
import torch

from bitsandbytes.nn import Linear8bitLt

from .models import DEVICE

pytestmark = pytest.mark.integration
WORKER = Path(__file__).with_name("fsdp_worker.py")


def run_two_processes(*arguments):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    root = str(Path(__file__).parents[2])
    environment = os.environ | {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "BNB_TEST_DEVICE": DEVICE.type,
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKER), *arguments],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
    for rank, (process, output) in enumerate(zip(processes, outputs, strict=True)):
        assert process.returncode == 0, f"rank {rank}:\n{output[-4000:]}"
        assert f"rank {rank} finished" in output


@pytest.mark.skipif(
    DEVICE.type != "cpu" and torch.accelerator.device_count() < 2, reason="each of the two processes needs a device"
)
@pytest.mark.parametrize(
    "storage",
    [
        "bfloat16",
        pytest.param("float16", marks=pytest.mark.slow),
        pytest.param("float32", marks=pytest.mark.slow),
    ],
)
def test_lora_training_equals_that_of_one_process(storage):
    run_two_processes(storage)


def test_integer_weights_cannot_ask_for_gradients():
    """FSDP shards what trains; int8 codes say at once that they do not."""
    layer = Linear8bitLt(64, 64, has_fp16_weights=False).to(DEVICE)
    with pytest.raises(RuntimeError, match="floating point"):
        layer.weight.requires_grad_(True)
    assert layer.weight.dtype == torch.int8
