#!/usr/bin/env python
"""Compare two runs of upstream's test suite: with upstream's wheel, and with this package.

    python tests/upstream/compare.py BASELINE OURS [OURS ...] [--expected FILE]

All are logs of `pytest -rA` (or -rpfExXs); a later one of ours replaces outcomes of an earlier one. Prints every test
that passes in the baseline and not in ours, unless a line of the expected list matches it, and every such line that is
out of date. Exit status 1 if there is any.
docs/upstream_tests.md says how to make the logs.
"""

import argparse
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path
import re
import sys

_SUMMARY = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS) (tests/\S+?\.py::.*?)(?: - .*)?$")
_EXPECTED = Path(__file__).with_name("expected_failures.txt")


def outcomes(log: str) -> dict[str, str]:
    """Outcome of every test, from the summary at the end of a log."""
    found = {}
    for line in log.splitlines():
        if match := _SUMMARY.match(line.rstrip()):
            found[match[2]] = match[1]
    return found


def expectations(text: str) -> dict[str, str]:
    """Pattern of test ids -> reason. Lines are `reason: pattern`; `*` matches anything, brackets are plain."""
    found = {}
    for line in text.splitlines():
        line = line.strip()
        if line and not line.startswith("#"):
            reason, _, pattern = line.partition(": ")
            if not pattern:
                raise SystemExit(f"expected list: a line must be `reason: pattern`, got {line!r}")
            found[pattern] = reason
    return found


def matches(test: str, pattern: str) -> bool:
    return fnmatchcase(test, pattern.replace("[", "[[]"))


def compare(baseline: dict[str, str], ours: dict[str, str], expected: dict[str, str]) -> tuple[list[str], Counter]:
    """Lines that describe what is unexpected, and how many tests each reason covers."""
    problems, covered = [], Counter()
    used = set()
    for test, outcome in baseline.items():
        if outcome != "PASSED":
            continue
        now = ours.get(test, "missing")
        patterns = [pattern for pattern in expected if matches(test, pattern)]
        if now == "PASSED":
            continue
        used.update(patterns)
        if patterns:
            covered[expected[patterns[0]]] += 1
        else:
            problems.append(f"passes with upstream's wheel, now {now}: {test}")
    problems += [f"expected to fail, but nothing that matches does: {p}" for p in expected if p not in used]
    return problems, covered


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("baseline", type=Path, help="log of the run with upstream's wheel")
    parser.add_argument("ours", type=Path, nargs="+", help="logs of runs with this package")
    parser.add_argument("--expected", type=Path, default=_EXPECTED, help="list of expected differences")
    options = parser.parse_args(arguments)

    baseline = outcomes(options.baseline.read_text(errors="replace"))
    ours = {}
    for path in options.ours:
        ours |= outcomes(path.read_text(errors="replace"))
    for name, found in (("baseline", baseline), ("ours", ours)):
        counts = Counter(found.values())
        print(f"{name}: " + (", ".join(f"{n} {kind}" for kind, n in sorted(counts.items())) or "no summary lines"))
        if "PASSED" not in counts:
            print(f"{name}: the log has no PASSED lines; run pytest with -rA")
            return 1
    problems, covered = compare(baseline, ours, expectations(options.expected.read_text()))
    for reason, number in sorted(covered.items()):
        print(f"expected: {number} ({reason})")
    for line in problems:
        print(line)
    print(f"{len(problems)} unexpected")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
