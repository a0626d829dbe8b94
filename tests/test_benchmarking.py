"""benchmarking/: every operation runs, results say what they should, mistakes are named. No test looks at a time."""

import csv
import json
import os
from pathlib import Path
import subprocess
import sys

import pytest

from benchmarking import compare

ROOT = Path(__file__).parents[1]
OPS = {
    *("quantize_4bit", "dequantize_4bit", "linear4bit", "embedding_4bit", "smollm2_tokens"),
    *("quantize_blockwise", "dequantize_blockwise", "adamw8bit", "adamw32bit"),
    *("int8_vectorwise_quant", "int8_linear_matmul", "linear8bit", "embedding_8bit"),
}
PROVENANCE = {
    *("date", "bitsandbytes", "file", "commit", "backends", "cpu_target", "torch", "python"),
    *("platform", "cpu", "cores", "threads"),
}
NUMBERS = ("repeats", "min_ms", "median_ms", "per_second", "bytes", "gb_per_s", "copy_ms", "copy_ratio")


def script(name, *args, cwd):
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarking" / name), *map(str, args)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """Every operation, with a tiny random model: what was printed, the rows of the CSV, the JSON."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("quick")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "model")
    done = script("run.py", "--quick", "--model", "model", "--csv", "r.csv", "--json", "r.json", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    with (folder / "r.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return done.stdout, rows, json.loads((folder / "r.json").read_text())


@pytest.mark.integration
def test_every_operation_has_results_with_all_fields(quick):
    printed, rows, found = quick
    assert found["provenance"].keys() == PROVENANCE
    assert {result["op"] for result in found["results"]} == OPS
    for result in found["results"]:
        assert result["error"] is None
        assert all(result[name] > 0 for name in NUMBERS)
        assert (result["torch_op"] is None) == (result["torch_ms"] is None) == (result["torch_ratio"] is None)
        assert result["implementation"] in ("default", "native")
        assert result["op"] in printed
    assert [row["op"] for row in rows] == [result["op"] for result in found["results"]]
    assert rows[0].keys() == {*found["results"][0], *PROVENANCE}


@pytest.mark.integration
def test_bytes_are_those_that_must_be_moved(quick):
    _, _, found = quick
    got = {(r["op"], r["variant"], r["batch"]): r["bytes"] for r in found["results"]}
    n, rows, columns = 96 * 128, 96, 128  # shapes/quick.txt
    packed = n // 2 + n // 64 * 4
    assert got["quantize_4bit", "nf4", None] == got["dequantize_4bit", "fp4", None] == 2 * n + packed
    assert got["quantize_blockwise", "", None] == 2 * n + n + n // 256 * 4
    assert got["int8_vectorwise_quant", "", None] == 2 * n + n + rows * 4
    assert got["linear4bit", "nf4", 4] == packed + 4 * 2 * (rows + columns)
    assert got["linear4bit", "nf4 nested", 1] == n // 2 + n // 64 + 4 + 2 * (rows + columns)
    assert got["linear8bit", "", 4] == n + rows * 4 + 4 * 2 * (rows + columns)
    assert got["embedding_4bit", "", 4] == 4 * (8 + packed // rows + 2 * columns)
    # The model's linear layers, attention and MLP, and what stays in bf16: two tables and three norms.
    linear = 4 * 64 * 64 + 3 * 64 * 128
    assert got["smollm2_tokens", "nf4", None] == linear // 2 + linear // 64 * 4 + 2 * (2 * 32 * 64 + 3 * 64)
    assert got["adamw32bit", "", None] == n * (2 * 3 + 2 * 8)
    assert got["adamw8bit", "", None] == n * (2 * 3 + 2 * 2) + n // 256 * 2 * 4 * 2


def test_fresh_memory_the_reference_and_a_failure(tmp_path):
    options = ("--memory", "fresh", "--implementation", "default", "--dtype", "fp32", "--json", "r.json")
    done = script("run.py", "--quick", "--op", "linear4bit", "--batch", 2, "--batch", -1, *options, cwd=tmp_path)
    assert done.returncode == 1  # there is no batch of -1
    results = json.loads((tmp_path / "r.json").read_text())["results"]
    got = [(r["dtype"], r["batch"], r["memory"], r["implementation"], r["error"] is None) for r in results]
    assert got == [("fp32", batch, "fresh", "default", batch == 2) for batch in (2, -1)] * 2
    assert results[0]["min_ms"] > 0
    assert "negative" in results[1]["error"] and "\n" not in results[1]["error"]
    assert results[1]["min_ms"] is None


@pytest.mark.parametrize(
    "option, value, known",
    [("--op", "transmogrify", "linear4bit"), ("--shapes", "nowhere", "llama3_8b"), ("--target", "quantum", "")],
)
def test_unknown_names(option, value, known, tmp_path):
    done = script("run.py", option, value, cwd=tmp_path)
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert value in last and known in last


def contents(results):
    return {"provenance": dict.fromkeys(PROVENANCE), "results": results}


def result_with(op="linear4bit", ms=2.0, ratio=4.0, error=None):
    numbers = {"min_ms": ms, "copy_ratio": ratio} if error is None else {"min_ms": None, "copy_ratio": None}
    return {**dict.fromkeys(compare._CASE), "op": op, "variant": "nf4", "dtype": "bf16", **numbers, "error": error}


@pytest.mark.parametrize(
    "after, status",
    [
        ([result_with()], 0),
        ([result_with(ms=3.0)], 0),  # the machine was slower, the copy too
        ([result_with(ratio=4.3)], 0),
        ([result_with(ratio=4.5)], 1),
        ([result_with(error="RuntimeError: a | b")], 1),
        ([], 1),
    ],
)
def test_two_files(after, status, tmp_path, capsys):
    files = [str(tmp_path / name) for name in ("before", "after")]
    for file, results in zip(files, ([result_with()], after), strict=True):
        Path(file).write_text(json.dumps(contents(results)))
    assert compare.main(["files", *files, "--tolerance", "0.1"]) == status
    out = capsys.readouterr().out
    assert "| linear4bit nf4 | bf16 |" in out
    assert ("worse or missing: linear4bit nf4 bf16" in out) == (status == 1)
    assert compare.main(["files", *files[::-1], "--by", "min_ms", "--tolerance", "0.1"]) == 0  # never slower backwards


@pytest.mark.parametrize(
    "arguments, what",
    [
        (("files", "nowhere.json", "nowhere.json"), "nowhere.json"),
        (("envs", "--env", "a=nowhere/python", "--env", "b="), "nowhere/python"),
        (("envs", "--env", "a="), "twice"),
    ],
)
def test_nothing_to_compare(arguments, what, capsys):
    with pytest.raises(SystemExit) as exit:
        compare.main(arguments)
    assert exit.value.code == 2
    assert what in capsys.readouterr().err.splitlines()[-1]


def test_two_environments(tmp_path, monkeypatch, capsys):
    """A stand-in for run.py that gives an environment's next planned results and writes down who ran."""
    stub = tmp_path / "stub.py"
    stub.write_text(
        "import json, os, pathlib, sys\n"
        "here = pathlib.Path(os.environ['PYTHONPATH'])\n"
        "(here.parent / 'order').open('a').write(here.name)\n"
        "op, target = sys.argv[sys.argv.index('--op') + 1], sys.argv[sys.argv.index('--json') + 1]\n"
        "assert sys.argv[-3:-2] == ['--quick'] and not os.listdir() and op != 'b', op\n"
        "plan = here / 'plan'\n"
        "first, *rest = json.loads(plan.read_text())\n"
        "plan.write_text(json.dumps(rest))\n"
        "pathlib.Path(target).write_text(json.dumps(first))\n"
    )
    monkeypatch.setattr(compare, "_RUN", stub)
    plans = {
        "A": [[result_with("a", 2.0), result_with("c", 1.0)], [result_with("a", 1.0), result_with("c", error="E: no")]],
        "B": [[result_with("a", 5.0), result_with("c", error="E: no")]] * 2,
    }
    for name, rounds in plans.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "plan").write_text(json.dumps([contents(results) for results in rounds]))
    envs = [part for name in plans for part in ("--env", f"{name}=:{tmp_path / name}")]
    output = tmp_path / "table.md"
    options = ("--op", "a", "--op", "b", "--rounds", "2", "--quick", "--output", str(output))
    assert compare.main(["envs", *envs, *options]) == 1
    assert (tmp_path / "order").read_text() == "ABABABAB"
    out = capsys.readouterr().out
    assert output.read_text() in out
    assert "| a nf4 | bf16 |  |  | 1 | 5 | 5.00 | 4 | 4 |" in out  # the fastest round
    assert "| c nf4 | bf16 |  |  | 1 | E: no |  | 4 |  |" in out
    assert "A: b gave no results: AssertionError: b" in out
    assert "worse or missing: b" in out
