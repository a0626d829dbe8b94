#!/usr/bin/env python
"""Time the operations of the installed bitsandbytes, against a copy of as many bytes and against PyTorch.

    python benchmarking/run.py --op linear4bit --shapes llama3_8b --dtype bf16 --json result.json

benchmarking/README.md says what is measured and what the columns mean.
"""

import argparse
from collections.abc import Iterator
import csv
from datetime import datetime, timezone
from importlib import import_module
from itertools import product
import json
import os
from pathlib import Path
import platform
import subprocess
import sys
import tempfile
from typing import Any

_SHAPES = Path(__file__).with_name("shapes")
_MODEL = Path(tempfile.gettempdir()) / "bitsandbytes-benchmarking-smollm2"
_LABEL = 70  # characters
_FAMILIES = ("fourbit", "blockwise", "int8", "optim")
_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}

#: What a result says, in the order of the columns.
FIELDS = (
    *("op", "variant", "dtype", "shape", "rows", "columns", "batch", "device", "memory", "implementation"),
    *("repeats", "min_ms", "median_ms", "per_second", "bytes", "gb_per_s", "copy_ms", "copy_ratio"),
    *("torch_op", "torch_ms", "torch_ratio", "error"),
)


def read_shapes(name: str) -> list[tuple[str, int, int]]:
    """The shapes of a list, (name, rows, columns)."""
    found = []
    for line in (_SHAPES / f"{name}.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            shape, rows, columns = line.split()
            found.append((shape, int(rows), int(columns)))
    return found


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    lists = sorted(path.stem for path in _SHAPES.glob("*.txt"))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--list", action="store_true", help="print the names of the operations and do nothing else")
    add("--op", action="append", help="an operation, may be repeated; all of them by default")
    add("--device", default="cpu", help="where to run: cpu (default), or any device of PyTorch")
    add("--implementation", choices=("native", "default"), default="native", help="default: the PyTorch reference")
    add("--target", help="instruction set of the native CPU kernels, such as scalar, avx2 or avx512")
    add("--shapes", choices=lists, help="a list of shapes; each operation has its own default")
    add("--dtype", choices=_DTYPES, action="append", help="may be repeated; bf16 by default")
    add("--batch", type=int, action="append", help="rows of a layer's input, may be repeated; 1, 16, 512 by default")
    add("--threads", type=int, help="threads of PyTorch and of the kernels")
    add("--memory", choices=("warm", "fresh"), default="warm", help="reuse memory, or take new pages and cold caches")
    add("--model", type=Path, default=_MODEL, help="folder of the model of smollm2_tokens; made where it is missing")
    add("--quick", action="store_true", help="tiny shapes and two repeats, to see that everything runs")
    add("--csv", type=Path, help="write the results to this file")
    add("--json", type=Path, help="write the results to this file, for compare.py")
    add("--plot", type=Path, help="draw the results into this picture; needs matplotlib")
    options = parser.parse_args(arguments)
    # Both are read once, when PyTorch and the package are imported. Nothing here imports them earlier.
    if options.threads:
        os.environ["OMP_NUM_THREADS"] = str(options.threads)
    if options.target:
        os.environ["BNB_CPU_TARGET"] = options.target

    try:
        from cases import OPERATIONS
        import torch
    except Exception as error:  # no such package, or a target that this machine does not have
        parser.error(f"cannot import what is to be timed: {error}")
    if options.target and _cpu_target() != options.target:
        parser.error(f"--target {options.target}: there are no native CPU kernels here, see python -m bitsandbytes")
    for name in options.op or ():
        if name not in OPERATIONS:
            parser.error(f"--op: there is no {name!r}, only {', '.join(OPERATIONS)}")
    try:
        options.device = torch.empty(0, device=options.device).device
    except (RuntimeError, AssertionError) as error:  # not compiled with this device
        parser.error(f"--device {options.device}: {str(error).splitlines()[0]}")
    if options.implementation == "default" and not _implementations(options.device.type):
        parser.error("--implementation default: the bitsandbytes that is installed here has no such reference")
    return options


def _dispatch_key(device_type: str) -> str:
    """The key under which the package registers kernels for a device."""
    return {"cpu": "CPU", "npu": "PrivateUse1"}.get(device_type, "CompositeExplicitAutograd")


def _implementations(device_type: str) -> dict[str, str]:
    """Operator -> name of its implementation on the device; empty for another bitsandbytes, which has no such table."""
    import bitsandbytes._ops

    table = getattr(bitsandbytes._ops, "implementations", {})
    return {op: by_key[_dispatch_key(device_type)] for op, by_key in table.items()}


def _use_reference(device_type: str) -> None:
    """Put the functions of `backends/default` behind every operator, so that layers and optimizers use them too."""
    from bitsandbytes._ops import register

    families = [import_module(f"bitsandbytes.backends.default.{name}") for name in _FAMILIES]
    for op, name in _implementations(device_type).items():
        if name != "default":
            function = op.replace(".", "_")
            kernel = next(getattr(family, function) for family in families if hasattr(family, function))
            register(op, kernel, _dispatch_key(device_type), "default")


def _cpu_target() -> str | None:
    """The instruction set in use by the native CPU kernels, None without them."""
    target = getattr(sys.modules.get("bitsandbytes.backends.cpu"), "target", None)
    return target and target()


def _commit(folder: Path) -> str | None:
    """The commit of a package that lies in a git working tree and belongs to it."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True, check=True).stdout

    try:
        return git("describe", "--always", "--dirty").strip() if git("ls-files", "__init__.py") else None
    except (OSError, subprocess.CalledProcessError):
        return None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def provenance() -> dict[str, Any]:
    """What the numbers of this process depend on."""
    import torch

    import bitsandbytes

    assert bitsandbytes.__file__ is not None
    package = Path(bitsandbytes.__file__).parent
    status = getattr(bitsandbytes.backends, "status", dict)
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "bitsandbytes": bitsandbytes.__version__,
        "file": f"{package.name}/__init__.py",
        "commit": _commit(package),
        "backends": ", ".join(name for name, (usable, _) in status().items() if usable),
        "cpu_target": _cpu_target(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Time what was asked for: a result for each combination. One that fails has its error instead of numbers."""
    from cases import OPERATIONS, Setting
    from timing import Effort, Memory, measure
    import torch

    effort = Effort(repeats=2, seconds=0.0) if options.quick else Effort()
    batches = options.batch or ((1, 4) if options.quick else (1, 16, 512))
    memory = Memory(options.memory, options.device)
    implementations = _implementations(options.device.type)
    for name in options.op or OPERATIONS:
        operation = OPERATIONS[name]
        shapes = [("", 0, 0)]
        if operation.shapes:
            shapes = read_shapes(options.shapes or ("quick" if options.quick else operation.shapes))
        for (shape, rows, columns), variant, dtype, batch in product(
            shapes, operation.variants, options.dtype or ("bf16",), batches if operation.batched else (0,)
        ):
            result = dict.fromkeys(FIELDS) | {
                "op": name,
                "variant": variant,
                "dtype": dtype,
                "shape": shape,
                "rows": rows or None,
                "columns": columns or None,
                "batch": batch or None,
                "device": str(options.device),
                "memory": options.memory,
                "implementation": implementations.get(operation.operator),
            }
            setting = Setting(
                variant,
                rows,
                columns,
                batch,
                getattr(torch, _DTYPES[dtype]),
                options.device,
                options.model,
                tokens=2 if options.quick else 16,
            )
            try:
                with torch.no_grad():
                    result |= measure(operation.set_up(setting), memory, effort)
            except Exception as error:
                result["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
            yield result


def _label(result: dict[str, Any]) -> str:
    shape = f"{result['shape']} {result['rows']}x{result['columns']}" if result["rows"] else ""
    batch = f"batch {result['batch']}" if result["batch"] else ""
    return " ".join(filter(None, (result["op"], result["variant"], result["dtype"], shape, batch)))


def _line(result: dict[str, Any]) -> str:
    if result["error"]:
        return f"{_label(result):<{_LABEL}} {result['error']}"
    numbers = "{min_ms:>10.3f} {per_second:>9.1f} {gb_per_s:>8.2f} {copy_ratio:>8.2f}".format(**result)
    other = "{torch_ratio:>8.2f} {torch_op}".format(**result) if result["torch_op"] else ""
    return f"{_label(result):<{_LABEL}} {numbers} {other}".rstrip()


def _write_csv(path: Path, about: dict[str, Any], results: list[dict[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, (*FIELDS, *about))
        writer.writeheader()
        writer.writerows({**result, **about} for result in results)


def _write_plot(path: Path, about: dict[str, Any], results: list[dict[str, Any]]) -> None:
    from matplotlib.figure import Figure

    drawn = [result for result in reversed(results) if not result["error"]]
    figure = Figure(figsize=(11, 1.5 + 0.25 * len(drawn)), layout="constrained")
    axes = figure.subplots()
    labels = [_label(result) for result in drawn]
    axes.barh(labels, [result["gb_per_s"] for result in drawn], label="operation")
    copies = [result["bytes"] / result["copy_ms"] / 1e6 for result in drawn]
    axes.plot(copies, labels, "|", color="black", markersize=10, label="copy")
    axes.set_xlabel("GB/s")
    axes.set_title(f"bitsandbytes {about['bitsandbytes']}, {about['cpu']}, {about['threads']} threads, {about['date']}")
    axes.legend()
    figure.savefig(path, dpi=120)


def main(arguments: list[str] | None = None) -> int:
    """Print and write the results; 1 if an operation failed."""
    options = _parse(arguments)
    from cases import OPERATIONS

    if options.list:
        print("\n".join(OPERATIONS))
        return 0
    if options.implementation == "default":
        _use_reference(options.device.type)
    about = provenance()
    print("\n".join(f"{name}: {value}" for name, value in about.items()))
    print(f"\n{'':<{_LABEL}} {'ms':>10} {'per s':>9} {'GB/s':>8} {'/ copy':>8} {'/ torch':>8}")
    results = []
    for result in run(options):
        print(_line(result), flush=True)
        results.append(result)
    if options.csv:
        _write_csv(options.csv, about, results)
    if options.json:
        options.json.write_text(
            json.dumps({"provenance": about, "results": results}, indent=2) + "\n", encoding="utf-8"
        )
    if options.plot:
        _write_plot(options.plot, about, results)
    return 1 if any(result["error"] for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
