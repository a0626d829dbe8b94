"""What torch.compile asks of a device."""

import importlib.abc
import importlib.util
import sys
from types import ModuleType

import torch

from . import npu

_MODULE = "torch._dynamo.device_interface"


def _register(device_interface: ModuleType) -> None:
    class Interface(device_interface.DeviceInterface):
        device = npu.device
        Event = npu.Event
        Stream = npu.Stream

        class Worker:
            set_device = staticmethod(npu.set_device)
            current_device = staticmethod(npu.current_device)
            get_device_properties = staticmethod(npu.get_device_properties)

        current_device = staticmethod(npu.current_device)
        set_device = staticmethod(npu.set_device)
        device_count = staticmethod(npu.device_count)
        is_available = staticmethod(npu.is_available)
        stream = staticmethod(npu.stream)
        current_stream = staticmethod(npu.current_stream)
        set_stream = staticmethod(npu.set_stream)
        synchronize = staticmethod(npu.synchronize)
        get_device_properties = staticmethod(npu.get_device_properties)
        get_compute_capability = staticmethod(npu.get_device_name)
        is_bf16_supported = staticmethod(npu.is_bf16_supported)
        memory_allocated = staticmethod(npu.memory_allocated)

        @staticmethod
        def get_raw_stream(index: int) -> int:
            return npu.current_stream(index).npu_stream

        @staticmethod
        def exchange_device(index: int) -> int:
            return torch.accelerator.device_index(index).__enter__() or npu.current_device()

        @staticmethod
        def maybe_exchange_device(index: int) -> int:
            return index

    device_interface.register_interface_for_device("npu", Interface)
    for index in range(npu.device_count()):
        device_interface.register_interface_for_device(f"npu:{index}", Interface)


class _Finder(importlib.abc.MetaPathFinder):
    """Lets `_register` run at the end of the module's import: importing it for its own sake takes seconds."""

    def find_spec(self, name, path, target=None):
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _register(module)

        spec.loader.exec_module = exec_module
        return spec


def register_when_imported() -> None:
    if _MODULE in sys.modules:
        _register(sys.modules[_MODULE])
    else:
        sys.meta_path.insert(0, _Finder())
