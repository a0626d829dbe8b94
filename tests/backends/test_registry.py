"""Which implementation runs where, and what the backends say about themselves."""

from contextlib import suppress

import pytest
import torch

import bitsandbytes
from bitsandbytes import _ops, backends
from tests.cases.samples import FIRST
from tests.helpers import FLOATS, QUANT_OPS, devices, dispatch_key, overload, targets


def test_every_operator_has_an_implementation_for_every_device():
    for op, by_key in _ops.implementations.items():
        assert {"CPU", "PrivateUse1", "CompositeExplicitAutograd"} <= set(by_key), op
        for key in by_key:
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"bitsandbytes::{op}", key), (op, key)


def test_every_operator_of_the_namespace_is_in_the_registry():
    names = {
        name.removeprefix("bitsandbytes::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("bitsandbytes::")
    }
    assert names == set(_ops.implementations)


@pytest.mark.parametrize("op", QUANT_OPS)
def test_the_registered_implementation_is_the_one_that_runs(op, monkeypatch):
    """The registry is filled by the call that registers the kernel, so the two cannot disagree."""
    calls = []
    library = torch.library.Library("bitsandbytes_registry_test", "FRAGMENT")
    monkeypatch.setattr(_ops, "_library", library)
    monkeypatch.setattr(_ops, "implementations", {op: {}})
    monkeypatch.setattr(_ops, "_kernels", {})
    monkeypatch.setitem(_ops._check_of, op, lambda *args: calls.append("check"))
    library.define(str(overload(op)._schema).removeprefix("bitsandbytes::"))
    _ops.register(op, lambda *args: calls.append("kernel"), "CPU", "mine")
    assert _ops.implementations == {op: {"CPU": "mine"}}
    name, _, variant = op.partition(".")
    mine = getattr(getattr(torch.ops.bitsandbytes_registry_test, name), variant or "default")
    with suppress(RuntimeError, TypeError):  # this kernel returns nothing, which PyTorch refuses for most schemas
        mine(*FIRST[op].args().values())
    assert calls == ["check", "kernel"]


def test_targets_cover_every_device_and_its_implementations():
    found = {(t.device, t.implementation) for t in targets()}
    for device in devices():
        for op in QUANT_OPS:
            registered = _ops.implementations[op][dispatch_key(device)]
            assert registered == "npu" or (device, registered) in found
        assert (device, "default") in found


def test_status_names_every_backend():
    status = backends.status()
    assert status["default"] == (True, "")
    assert all(available or why for available, why in status.values())


def test_a_foreign_backend_that_fails_is_a_warning_and_a_status(monkeypatch):
    class Broken:
        name = "broken"

        def load(self):
            raise OSError("no such library: libbroken.so")

    monkeypatch.setattr(backends, "_status", {})
    monkeypatch.setattr(backends, "entry_points", lambda group: [Broken()])
    with pytest.warns(UserWarning, match=r"broken.*libbroken\.so"):
        backends.load()
    available, why = backends.status()["broken"]
    assert not available
    assert "OSError" in why and "libbroken.so" in why
    assert backends.status()["default"][0]


def test_a_foreign_backend_is_called_once(monkeypatch):
    calls = []

    class Fine:
        name = "fine"

        def load(self):
            return lambda: calls.append(1)

    monkeypatch.setattr(backends, "_status", {})
    monkeypatch.setattr(backends, "entry_points", lambda group: [Fine()])
    backends.load()
    assert calls == [1]
    assert backends.status()["fine"] == (True, "")


def test_supported_devices_are_strings_of_device_types():
    assert all(torch.device(name).type == name for name in bitsandbytes.supported_torch_devices - {"npu"})
    assert FLOATS == bitsandbytes.formats.FLOAT_DTYPES
