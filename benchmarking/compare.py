#!/usr/bin/env python
"""Compare results of run.py: two files, or two environments in interleaved runs.

    python benchmarking/compare.py files before.json after.json --tolerance 0.1
    python benchmarking/compare.py envs --env ours=venv/bin/python --env upstream=other/bin/python --shapes llama3_8b

The table is Markdown. benchmarking/README.md says more.
"""

import argparse
from collections.abc import Iterable
from dataclasses import dataclass, field
import json
import os
from pathlib import Path
import shutil
import subprocess
import sys
import tempfile
from typing import Any, TypeGuard

_RUN = Path(__file__).with_name("run.py").resolve()
_CASE = ("op", "variant", "dtype", "shape", "rows", "columns", "batch", "device", "memory")
_SHOWN = ("bitsandbytes", "commit", "torch", "python", "cpu", "threads", "cpu_target")

Results = dict[tuple, dict[str, Any]]  # by the values of _CASE


def _by_case(results: Iterable[dict[str, Any]]) -> Results:
    return {tuple(result[name] for name in _CASE): result for result in results}


def _table(header: list[str], rows: list[list[str]]) -> str:
    """Markdown; what follows the batch is numbers."""
    align = ["---" if name in ("op", "dtype", "shape") else "---:" for name in header]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, align, *rows))


def _names(case: tuple) -> list[str]:
    """The cells that say which case it is: op, dtype, shape, batch."""
    what = dict(zip(_CASE, case, strict=True))
    shape = f"{what['shape']} {what['rows']}x{what['columns']}" if what["rows"] else ""
    return [f"{what['op']} {what['variant']}".strip(), what["dtype"], shape, str(what["batch"] or "")]


def _works(result: dict[str, Any] | None) -> TypeGuard[dict[str, Any]]:
    return result is not None and result["error"] is None


def _time(result: dict[str, Any] | None) -> str:
    """The time, or why there is none."""
    if _works(result):
        return f"{result['min_ms']:.4g}"
    return "missing" if result is None else result["error"].replace("|", "/")


def _ratio(result: dict[str, Any] | None) -> str:
    return f"{result['copy_ratio']:.4g}" if _works(result) else ""


def _read(path: str) -> dict[str, Any]:
    """The contents of a result file."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"cannot read {path}: {error}") from None


def _about(name: str, provenance: dict[str, Any]) -> str:
    return f"{name}: " + ", ".join(f"{key} {provenance[key]}" for key in _SHOWN if provenance[key] is not None)


def compare_files(before: dict[str, Any], after: dict[str, Any], by: str, tolerance: float) -> tuple[str, list[str]]:
    """The report on two files' contents, and the cases that got worse or do not work any more."""
    old, new = _by_case(before["results"]), _by_case(after["results"])
    rows, regressions = [], []
    for case, was in old.items():
        now = new.get(case)
        ratio = now[by] / was[by] if _works(was) and _works(now) else None
        if _works(was) and (ratio is None or ratio > 1 + tolerance):
            regressions.append(" ".join(filter(None, _names(case))))
        rows.append([*_names(case), _time(was), _time(now), _ratio(was), _ratio(now), f"{ratio:.3f}" if ratio else ""])
    header = ["op", "dtype", "shape", "batch", "ms before", "ms after", "/ copy before", "/ copy after"]
    header.append(f"{by} after / before")
    about = [_about(name, file["provenance"]) for name, file in (("before", before), ("after", after))]
    return "\n\n".join([*about, _table(header, rows)]), regressions


@dataclass
class Environment:
    """An interpreter and the PYTHONPATH that it gets, with the fastest results of its runs."""

    name: str
    python: str
    pythonpath: str
    best: Results = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)  # by operation, of runs that gave no results
    about: str = ""

    @classmethod
    def parse(cls, text: str) -> "Environment":
        """From `NAME=PYTHON[:PYTHONPATH]`; without PYTHON it is the interpreter that runs this."""
        name, equals, where = text.partition("=")
        if not (name and equals):
            raise argparse.ArgumentTypeError(f"must be NAME=PYTHON[:PYTHONPATH], got {text!r}")
        python, _, paths = where.partition(":")
        python = python or sys.executable
        if shutil.which(python) is None:
            raise argparse.ArgumentTypeError(f"there is no {python} that can be run")
        # Absolute, because the runs have a folder of their own; links stay, because a virtual environment is one.
        pythonpath = os.pathsep.join(os.path.abspath(path) for path in paths.split(os.pathsep) if path)
        return cls(name, os.path.abspath(python) if os.sep in python else python, pythonpath)

    def start(self, arguments: list[str], folder: str) -> subprocess.CompletedProcess[str]:
        """Run run.py in `folder`, which holds no package that could be taken for the environment's own."""
        environ = {**os.environ, "PYTHONPATH": self.pythonpath}
        command = [self.python, str(_RUN), *arguments]
        return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)

    def measure(self, op: str, arguments: list[str], folder: str) -> None:
        """One run of one operation."""
        file = Path(folder) / "results.json"
        file.unlink(missing_ok=True)
        done = self.start(["--op", op, *arguments, "--json", str(file)], folder)
        if not file.exists():
            self.errors[op] = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
            return
        found = json.loads(file.read_text(encoding="utf-8"))
        self.about = _about(self.name, found["provenance"])
        for case, result in _by_case(found["results"]).items():
            known = self.best.get(case)
            if known is None or (_works(result) and not (_works(known) and known["min_ms"] <= result["min_ms"])):
                self.best[case] = result

    def result(self, case: tuple) -> dict[str, Any] | None:
        """The fastest result of a case, or one that says why there is none."""
        error = self.errors.get(case[_CASE.index("op")])
        return self.best.get(case, None if error is None else {"error": error})


def compare_environments(
    ours: Environment, theirs: Environment, ops: list[str] | None, rounds: int, passed: list[str]
) -> tuple[str, list[str]]:
    """The report on runs that alternate between two environments, the fastest of each, and operations without any."""
    with tempfile.TemporaryDirectory() as folder:
        if ops is None:
            listed = ours.start(["--list"], folder)
            if listed.returncode:
                raise SystemExit(f"{ours.name}: {listed.stderr}")
            ops = listed.stdout.split()
        for op in ops:
            for _ in range(rounds):
                for environment in (ours, theirs):
                    environment.measure(op, passed, folder)
            print(f"{op} done", file=sys.stderr, flush=True)
    rows = []
    for case in dict.fromkeys((*ours.best, *theirs.best)):
        one, other = ours.result(case), theirs.result(case)
        speedup = f"{other['min_ms'] / one['min_ms']:.2f}" if _works(one) and _works(other) else ""
        rows.append([*_names(case), _time(one), _time(other), speedup, _ratio(one), _ratio(other)])
    header = ["op", "dtype", "shape", "batch", f"{ours.name} ms", f"{theirs.name} ms", "speed-up"]
    header += [f"{environment.name} / copy" for environment in (ours, theirs)]
    failed = [f"{e.name}: {op} gave no results: {why}" for e in (ours, theirs) for op, why in e.errors.items()]
    report = "\n\n".join([ours.about, theirs.about, _table(header, rows), *failed])
    return report, [op for op in ops if op in ours.errors and op in theirs.errors]


def main(arguments: list[str] | None = None) -> int:
    """Print the table; 1 if something got worse or has no results at all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    files = commands.add_parser("files", help="two result files")
    files.add_argument("before", type=_read)
    files.add_argument("after", type=_read)
    files.add_argument("--tolerance", type=float, default=0.1, help="share by which a case may be slower; 0.1")
    files.add_argument("--by", choices=("copy_ratio", "min_ms"), default="copy_ratio", help="what is compared")
    envs = commands.add_parser("envs", help="two environments; options that are not listed here go to run.py")
    envs.add_argument("--env", type=Environment.parse, action="append", help="NAME=PYTHON[:PYTHONPATH], twice")
    envs.add_argument("--op", action="append", help="an operation, may be repeated; all of them by default")
    envs.add_argument("--rounds", type=int, default=3, help="runs of each operation and environment")
    for command in (files, envs):
        command.add_argument("--output", type=Path, help="write the table to this file, too")
    options, passed = parser.parse_known_args(arguments)

    if options.command == "files":
        if passed:
            parser.error(f"unknown arguments: {' '.join(passed)}")
        report, problems = compare_files(options.before, options.after, options.by, options.tolerance)
    else:
        if len(options.env or ()) != 2:
            parser.error("envs needs --env twice")
        ours, theirs = options.env
        report, problems = compare_environments(ours, theirs, options.op, options.rounds, passed)
    print(report)
    if options.output:
        options.output.write_text(report + "\n", encoding="utf-8")
    for case in problems:
        print(f"worse or missing: {case}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
