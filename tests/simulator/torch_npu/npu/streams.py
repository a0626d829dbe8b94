"""Streams and events."""

import ctypes
from time import perf_counter
from typing import Any

import torch

from ._devices import _get_device_index, current_device, set_device

__all__ = ["Event", "Stream", "StreamContext", "current_stream", "default_stream", "set_stream", "stream"]


class Stream(torch.Stream):
    def __new__(cls, device: Any = None, priority: int = 0, **identity: int):
        if identity:  # stream_id, device_index, device_type: a second object for the same stream
            return super().__new__(cls, **identity)
        return super().__new__(cls, torch.device("npu", _get_device_index(device)), priority=priority)

    @property
    def npu_stream(self) -> int:
        """The address for a launch. Reading it counts: on the real device it waits for the queue of launches."""
        return self.native_handle

    @property
    def _as_parameter_(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.npu_stream)

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: "Event") -> None:
        event.wait(self)

    def wait_stream(self, stream: "Stream") -> None:
        self.wait_event(stream.record_event())

    def __repr__(self) -> str:
        return f"<torch_npu.npu.Stream device={self.device} stream_id={self.stream_id}>"


class Event(torch.Event):
    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False):
        return super().__new__(cls, torch.device("npu"), enable_timing=enable_timing)

    def record(self, stream: torch.Stream | None = None) -> None:
        self._time = perf_counter()
        super().record(current_stream() if stream is None else stream)

    def wait(self, stream: torch.Stream | None = None) -> None:
        super().wait(current_stream() if stream is None else stream)

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds. The base class takes no subclasses here."""
        return (end._time - self._time) * 1e3


def _same(stream: torch.Stream) -> Stream:
    return Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)


def current_stream(device: Any = None) -> Stream:
    return _same(torch.accelerator.current_stream(_get_device_index(device)))


def default_stream(device: Any = None) -> Stream:
    kind = torch.accelerator.current_stream(0).device_type
    return Stream(stream_id=0, device_index=_get_device_index(device), device_type=kind)


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


class StreamContext:
    """Makes a stream and its device the current ones; None leaves them as they are."""

    def __init__(self, stream: torch.Stream | None):
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.device = current_device()
            self.previous = current_stream(self.stream.device)
            set_stream(self.stream)

    def __exit__(self, *_) -> None:
        if self.stream is not None:
            set_stream(self.previous)
            set_device(self.device)


def stream(stream: torch.Stream | None) -> StreamContext:
    return StreamContext(stream)
