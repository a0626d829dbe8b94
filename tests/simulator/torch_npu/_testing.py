"""What the simulated device tells tests. The real torch_npu has nothing of this."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from . import _native

host_address = _native.host_address
device_of_address = _native.device_of_address


@dataclass
class Counts:
    """What the host had to do with the device, and what ran there."""

    copies_to_host: int = 0
    copies_to_device: int = 0
    items: int = 0  # reads of one value: .item(), bool(), float()
    synchronisations: int = 0  # explicit ones, and ops whose result has a shape that depends on values
    stream_reads: int = 0
    launches: int = 0
    ops: Counter = field(default_factory=Counter)  # "aten::name.overload" -> number of launches

    @property
    def waits(self) -> int:
        """How often the host had to wait for the device, or the device for the host."""
        return self.copies_to_host + self.copies_to_device + self.items + self.synchronisations


def _launched() -> Counter:
    lines = _native.launched_ops().decode().splitlines()
    return Counter({op: int(count) for op, count in (line.rsplit(" ", 1) for line in lines)})


@contextmanager
def counting() -> Iterator[Counts]:
    """Counts what happens within the context, over all threads; the numbers are there when it ends."""
    counts = Counts()
    before, ops_before = _native.counters(), _launched()
    try:
        yield counts
    finally:
        now = [after - first for after, first in zip(_native.counters(), before, strict=True)]
        counts.__init__(*now, _launched() - ops_before)
