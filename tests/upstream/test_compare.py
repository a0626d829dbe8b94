"""The comparison of two runs of upstream's suite."""

import pytest

from .compare import _EXPECTED, compare, expectations, main, outcomes

BASELINE = """
tests/test_a.py::test_one PASSED [ 10%]
PASSED tests/test_a.py::test_one
PASSED tests/test_a.py::test_two[dim=1-fp4-cpu]
PASSED tests/test_a.py::test_two[dim=2-fp4-cpu]
SKIPPED [3] tests/test_a.py:12: no accelerator
XFAIL tests/test_a.py::test_three - a reason
FAILED tests/test_a.py::test_four - AssertionError: x - y
= 3 passed, 1 failed in 1.00s =
"""
OURS = BASELINE.replace("PASSED tests/test_a.py::test_two[dim=2", "FAILED tests/test_a.py::test_two[dim=2")


def run(tmp_path, *logs, expected):
    paths = []
    for number, text in enumerate((*logs, expected)):
        paths.append(tmp_path / str(number))
        paths[-1].write_text(text)
    *paths, expected_path = map(str, paths)
    return main([*paths, "--expected", expected_path])


def test_outcomes_come_from_the_summary_alone():
    assert outcomes(BASELINE) == {
        "tests/test_a.py::test_one": "PASSED",
        "tests/test_a.py::test_two[dim=1-fp4-cpu]": "PASSED",
        "tests/test_a.py::test_two[dim=2-fp4-cpu]": "PASSED",
        "tests/test_a.py::test_three": "XFAIL",
        "tests/test_a.py::test_four": "FAILED",
    }


def test_an_unexpected_difference(tmp_path, capsys):
    assert run(tmp_path, BASELINE, OURS, expected="") == 1
    assert "now FAILED: tests/test_a.py::test_two[dim=2-fp4-cpu]" in capsys.readouterr().out


@pytest.mark.parametrize("pattern", ["test_two[dim=2-fp4-cpu]", "test_two[*]", "*"])
def test_an_expected_difference(tmp_path, capsys, pattern):
    assert run(tmp_path, BASELINE, OURS, expected=f"# why\n\nreason: tests/test_a.py::{pattern}\n") == 0
    assert "1 (reason)" in capsys.readouterr().out


def test_a_missing_test_is_a_difference():
    baseline = outcomes(BASELINE)
    problems, _ = compare(baseline, {"tests/test_a.py::test_one": "PASSED"}, {})
    assert len(problems) == 2 and all("missing" in line for line in problems)


def test_an_expectation_that_is_out_of_date(tmp_path, capsys):
    assert run(tmp_path, BASELINE, OURS, BASELINE, expected="reason: tests/test_a.py::test_two[*]") == 1
    assert "nothing that matches" in capsys.readouterr().out


def test_a_log_without_passed_lines_is_refused(tmp_path):
    assert run(tmp_path, BASELINE, "3 passed", expected="") == 1


def test_every_line_of_our_list_has_a_reason():
    expected = expectations(_EXPECTED.read_text())
    assert expected and all(pattern.startswith("tests/test_") and reason for pattern, reason in expected.items())
    with pytest.raises(SystemExit, match="reason: pattern"):
        expectations("tests/test_a.py::test_one")
