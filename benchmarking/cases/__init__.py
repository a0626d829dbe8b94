"""The operations that are timed, a file per family of operators and a set-up function per operation.

They use public functions and modules alone, so that they run in an environment with another bitsandbytes too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Setting:
    """What an operation is timed on.

    Attributes:
        variant: One of the operation's variants.
        rows, columns: Shape of the tensor or weight.
        batch: Rows of the input of a layer, or tokens of a lookup.
        model: Folder of the Hugging Face model for operations that run one.
        tokens: Tokens that such a model writes in a call.
    """

    variant: str
    rows: int
    columns: int
    batch: int
    dtype: torch.dtype
    device: torch.device
    model: Path
    tokens: int

    def randn(self, *shape: int) -> torch.Tensor:
        """Normal values, the same in every environment."""
        return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(self.dtype).to(self.device)

    def token_ids(self) -> torch.Tensor:
        """Rows of a table, `batch` of them."""
        return torch.randint(self.rows, (self.batch,), generator=torch.Generator().manual_seed(0)).to(self.device)


@dataclass(frozen=True)
class Case:
    """An operation that is ready to be timed.

    Attributes:
        call: Takes `inputs`.
        inputs: What a caller makes anew for each call. Weights and states belong to `call`: they live long.
        moved: Bytes that must at least be read and written for one unit.
        torch_op, torch_call: What PyTorch has for the same purpose, with the same inputs.
        units: What one call does, if it is not one thing: tokens.
    """

    call: Callable[..., object]
    inputs: tuple[torch.Tensor, ...]
    moved: int
    torch_op: str = ""
    torch_call: Callable[..., object] | None = None
    units: int = 1


@dataclass(frozen=True)
class Operation:
    """How to set an operation up, and over what to vary it.

    Attributes:
        operator: The operator of `bitsandbytes._ops` that does the work.
        batched: Whether the batch matters.
        shapes: Its own list of shapes; none if it has no shape.
    """

    set_up: Callable[[Setting], Case]
    operator: str
    variants: tuple[str, ...]
    batched: bool
    shapes: str | None


#: Name -> operation.
OPERATIONS: dict[str, Operation] = {}


def operation(
    operator: str, variants: tuple[str, ...] = ("",), batched: bool = False, shapes: str | None = "square"
) -> Callable[[Callable[[Setting], Case]], Callable[[Setting], Case]]:
    """Add the decorated set-up function to `OPERATIONS`, under its own name."""

    def add(set_up: Callable[[Setting], Case]) -> Callable[[Setting], Case]:
        OPERATIONS[set_up.__name__] = Operation(set_up, operator, variants, batched, shapes)
        return set_up

    return add


def nbytes(*tensors: torch.Tensor) -> int:
    """Bytes of all elements."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


from . import blockwise, fourbit, int8, optim  # noqa: E402, F401  each adds its operations
