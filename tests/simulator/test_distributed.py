"""Two processes, one device each, over `hccl`: collectives, FSDP2 and DDP."""

from pathlib import Path
import subprocess
import sys

from tests.simulator.helpers import only_simulated

pytestmark = only_simulated

WORKER = Path(__file__).with_name("distributed_worker.py")


def test_two_devices(tmp_path):
    command = [sys.executable, str(WORKER), str(tmp_path / "rendezvous")]
    workers = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in range(2)
    ]
    outputs = [worker.communicate(timeout=300)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(outputs)
