"""What the tests of the simulated machine share."""

from contextlib import AbstractContextManager
import os
import subprocess
import sys

import pytest

from tests.helpers import devices

_SIMULATED = getattr(sys.modules.get("torch_npu"), "is_simulated", False) and "npu" in {d[:3] for d in devices()}

only_simulated = pytest.mark.skipif(
    not _SIMULATED, reason="needs the simulated NPU: PYTHONPATH=tests/simulator BNB_TEST_DEVICE=npu:0"
)


def counted() -> AbstractContextManager:
    """Counts the traffic between host and device; only where there is the simulated NPU."""
    from torch_npu._testing import counting

    return counting()


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess:
    """Runs `code` in a new process, for what can only be chosen before the first import."""
    return subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True, timeout=300
    )


def printed_by(code: str, **environment: str) -> str:
    done = run_python(code, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
