"""`python -m bitsandbytes info`: the report, its JSON form, and that a broken installation is noticed."""

import json

import pytest
import torch

import bitsandbytes
from bitsandbytes import functional
from bitsandbytes._ops import implementations
from bitsandbytes.cli import info, selftest

CPU = torch.device("cpu")


def test_healthy_host(run_module):
    done = run_module()
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "All is well."
    assert done.stderr == ""
    for part in (bitsandbytes.__version__, torch.__version__, "Operators on cpu", "quantize_4bit", *selftest.CHECKS):
        assert part in done.stdout


def test_info_is_the_default_command(command):
    assert command("info")[:2] == command()[:2]


@pytest.mark.parametrize("args", [("--json",), ("info", "--json")])
def test_json(command, args):
    status, out, err = command(*args)
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert found["versions"]["bitsandbytes"] == bitsandbytes.__version__
    assert found["devices"][0] == "cpu"
    assert found["backends"]["default"] == {"available": True, "why_not": ""}
    assert set(found["operators"]["cpu"]) == set(implementations)
    assert "none" not in found["operators"]["cpu"].values()
    assert found["self_test"]["cpu"] == {name: {"passed": True, "why_not": ""} for name in selftest.CHECKS}
    assert (found["healthy"], found["cause"]) == (True, None)


def test_versions_do_not_import_the_packages(run_module):
    done = run_module("info", python_args=("-X", "importtime"))
    assert "bitsandbytes.cli.info" in done.stderr
    for heavy in ("transformers", "peft", "diffusers", "matplotlib"):
        assert f" {heavy}\n" not in done.stderr


def _off_by_one(wrapped):
    """Change the last element of the first tensor that `wrapped` returns."""

    def wrong(*args, **kwargs):
        result = wrapped(*args, **kwargs)
        first = result[0] if isinstance(result, tuple) else result
        first.view(-1)[-1] += 1
        return result

    return wrong


BROKEN = {
    "quantize_4bit": {"NF4", "FP4"},
    "dequantize_4bit": {"NF4", "FP4", "nested statistics"},
    "quantize_blockwise": {"8-bit blockwise"},
    "dequantize_blockwise": {"8-bit blockwise"},
    "int8_vectorwise_quant": {"int8 rows"},
    "int8_linear_matmul": {"int8 matmul"},
    "int8_mm_dequant": {"int8 matmul"},
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_wrong_value_is_found(monkeypatch, name):
    monkeypatch.setattr(functional, name, _off_by_one(getattr(functional, name)))
    failed = {check for check, why in selftest.run(CPU).items() if why}
    assert failed >= BROKEN[name]


def test_a_wrong_matmul_is_found(monkeypatch):
    monkeypatch.setattr(selftest, "matmul_4bit", _off_by_one(selftest.matmul_4bit))
    assert "4-bit matmul" in {check for check, why in selftest.run(CPU).items() if why}


@pytest.mark.parametrize("name", ["Adam", "Adam8bit"])
def test_a_wrong_optimizer_is_found(monkeypatch, name):
    class Wrong(getattr(selftest.optim, name)):
        def step(self, closure=None):
            super().step(closure)
            for parameter in self.param_groups[0]["params"]:
                parameter.data[-1] = float("nan")

    monkeypatch.setattr(selftest.optim, name, Wrong)
    assert "optimizer step" in {check for check, why in selftest.run(CPU).items() if why}


def test_the_cause_is_the_last_line(monkeypatch, command):
    def refuse(*args, **kwargs):
        raise RuntimeError("the kernel is missing\nsecond line")

    monkeypatch.setattr(functional, "int8_vectorwise_quant", refuse)
    cause = "cpu: int8 rows: RuntimeError: the kernel is missing"
    status, out, _ = command()
    assert status == 1
    assert out.splitlines()[-1] == f"Something is wrong: {cause}"
    assert "ok" in out  # the other checks ran

    status, out, err = command("--json")
    assert status == 1
    assert json.loads(out)["cause"] == cause
    assert err.splitlines()[-1] == f"Something is wrong: {cause}"


def test_a_package_that_cannot_be_imported(run_module, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['bitsandbytes.functional'] = None\n")
    done = run_module(pythonpath=tmp_path)
    assert done.returncode == 1
    assert "bitsandbytes.functional" in (done.stdout + done.stderr).splitlines()[-1]


def test_operators_of_each_kind_of_device():
    for kind in ("cpu", "npu", "cuda"):
        assert set(info.operators(kind)) == set(implementations)
        assert "none" not in info.operators(kind).values()
