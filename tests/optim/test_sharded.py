"""FSDP2 on two processes: full and sharded optimizer checkpoints come back to the bit."""

from pathlib import Path
import subprocess
import sys

import pytest
import torch


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this build of PyTorch has no torch.distributed")
def test_optimizer_checkpoints_of_sharded_models(tmp_path):
    root = Path(__file__).parents[2]
    command = [sys.executable, str(Path(__file__).with_name("sharded_worker.py"))]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path)],
            cwd=root,
            env={"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=300)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(outputs)
