"""Importing the package: silent, offline, without an accelerator."""

from importlib.metadata import distributions
import os
from pathlib import Path
import re
import subprocess
import sys

import pytest

# A socket or a name look-up ends the process with an error.
OFFLINE = """
import socket
def refuse(*args, **kwargs):
    raise SystemExit("the network was used")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
"""
USE = """
import bitsandbytes, torch
import bitsandbytes.functional as F
packed, state = F.quantize_4bit(torch.ones(4, 64), quant_type="nf4", compress_statistics=True)
assert torch.equal(F.dequantize_4bit(packed, state), torch.ones(4, 64))
"""


def run(code: str, **environment: str) -> subprocess.CompletedProcess:
    root = Path(__file__).parents[1]
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=os.environ
        | {"PYTHONPATH": str(root), "CUDA_VISIBLE_DEVICES": "", "ASCEND_RT_VISIBLE_DEVICES": ""}
        | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


# bitsandbytes#592: the import failed without CUDA. bitsandbytes#2064: a torch built for CUDA fetched and warned.
@pytest.mark.parametrize("before", ["", "import torch; torch.version.cuda = '13.0'"], ids=["plain", "torch for CUDA"])
def test_import_and_first_use_print_nothing_warn_nothing_and_stay_offline(before):
    result = run(OFFLINE + before + USE)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_import_loads_no_optional_dependency_and_changes_no_global_setting_of_torch():
    names = "transformers", "accelerate", "scipy", "triton", "torch_npu", "kernels", "torch._dynamo"
    state = (
        "torch.get_default_dtype(), torch.get_num_threads(), torch.get_float32_matmul_precision(), torch.initial_seed()"
    )
    result = run(
        f"import sys, torch; torch.manual_seed(3); a = {state}; before = set(sys.modules); import bitsandbytes\n"
        f"assert a == ({state}), a\n"
        f"print([name for name in {names} if name in sys.modules and name not in before])"
    )
    assert (result.stdout.strip(), result.stderr) == ("[]", "")


# bitsandbytes#1218: releases without a wheel for a machine or a Python made pip install an old version without a word.
def test_one_wheel_of_a_platform_serves_every_python_and_every_torch():
    # A source tree has a second record, an egg-info, which says nothing of wheels.
    wheels = list(filter(None, (found.read_text("WHEEL") for found in distributions(name="bitsandbytes"))))
    assert wheels
    for wheel in wheels:
        (tag,) = re.findall("^Tag: (.*)$", wheel, re.MULTILINE)
        assert re.fullmatch(r"py3-none-(any|(many)?linux\w*)", tag)
        assert ("Root-Is-Purelib: true" in wheel) == tag.endswith("any")
