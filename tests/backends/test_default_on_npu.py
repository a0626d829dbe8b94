"""What the reference asks of PyTorch, an Ascend NPU can do: seen from the CPU, by the operators it calls."""

from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.cases.reference import forget_tables, reference_calls
from tests.helpers import reference_on_the_cpu

WITHOUT_KERNEL = Path(__file__).parents[1] / "simulator/aten_without_kernel.txt"


class Recorder(TorchDispatchMode):
    """Notes the operators that run inside, and the dtypes of their tensors."""

    def __init__(self):
        super().__init__()
        self.seen: set[tuple[str, str, torch.dtype]] = set()
        self.label = ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, torch.Tensor):
                self.seen.add((self.label, func.name(), leaf.dtype))
        return result

    def uses(self, names) -> set[tuple[str, str]]:
        return {(label, name) for label, name, _ in self.seen if name in names}


@pytest.fixture(scope="module")
def without_kernel() -> frozenset[str]:
    lines = WITHOUT_KERNEL.read_text().splitlines()
    return frozenset(line for line in lines if not line.startswith("#"))


@pytest.fixture(scope="module")
def recorder() -> Recorder:
    recorder = Recorder()
    forget_tables()
    with reference_on_the_cpu():
        for label, function, args in reference_calls():
            with recorder:
                recorder.label = label
                function(*args)
    return recorder


def test_the_recorder_sees_an_operator_that_the_device_lacks(without_kernel):
    a = torch.zeros(32, 32, dtype=torch.int8)
    with Recorder() as recorder:
        torch._int_mm(a, a)
    assert recorder.uses(without_kernel) == {("", "aten::_int_mm")}


def test_the_device_has_a_kernel_for_every_operator(recorder, without_kernel):
    assert recorder.uses({"aten::mm"})
    assert not recorder.uses(without_kernel)


def test_nothing_is_computed_in_float64(recorder):
    assert not {entry for entry in recorder.seen if entry[2] is torch.float64}


def test_4bit_codes_are_never_widened_to_64_bits(recorder):
    assert not {entry for entry in recorder.seen if entry[0].startswith("quantize_4bit") and entry[2] is torch.int64}
