"""`QuantState`, what is needed besides the codes to decode a tensor, and its on-disk form."""

import copy
import json
from typing import Any

import torch

from .errors import ArgumentError
from .formats import QUANT_TYPES

_PACKED_PREFIX = "bitsandbytes__"


def pack_dict_to_tensor(source_dict: dict[str, Any]) -> torch.Tensor:
    """UTF-8 JSON of `source_dict` as a uint8 vector on the CPU: safetensors files hold tensors only."""
    return torch.tensor(list(json.dumps(source_dict).encode()), dtype=torch.uint8, device="cpu")


def unpack_tensor_to_dict(tensor_data: torch.Tensor) -> dict[str, Any]:
    """The inverse of `pack_dict_to_tensor`, for a tensor on any device."""
    return json.loads(bytes(tensor_data.tolist()).decode())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _row_major(absmax: torch.Tensor, shape: list[int] | None, blocksize: int) -> torch.Tensor:
    """The scales in the order of the blocks, fp32 if they are not codes.

    Upstream writes a layer that ran on an AVX512-BF16 CPU before it was saved with its scales as bfloat16 and
    transposed, (in_features / blocksize, out_features); its packed codes are in the usual order.
    """
    if absmax.dim() == 2 and shape is not None and tuple(absmax.shape) == (shape[-1] // blocksize, shape[0]):
        absmax = absmax.t().reshape(-1)
    return absmax.float() if absmax.is_floating_point() else absmax


class QuantState:
    """Decoding data of a quantised tensor.

    Attributes (all may be assigned):
        absmax: fp32 scale of every block, or its uint8 codes when `nested`.
        shape: Shape of the original tensor.
        code: fp32 levels, 16 for a 4-bit type and 256 for an 8-bit map.
        dtype: dtype of the original tensor.
        blocksize: Elements of a block of the flattened tensor.
        quant_type: "nf4", "fp4", or None for 8-bit blockwise.
        offset: fp32 scalar that was subtracted from the scales before they were quantised (nested only).
        state2: `QuantState` of the scales (nested only).
        nested: Whether the scales are quantised.
    """

    valid_quant_types = ("fp4", "nf4")
    valid_qs_type_keys = [_PACKED_PREFIX + name for name in valid_quant_types]
    valid_qs_keys = [
        "absmax",
        "quant_map",
        "nested_absmax",
        "nested_quant_map",
        "quant_state",
        "quant_type",
        "blocksize",
        "dtype",
        "shape",
        "nested_blocksize",
        "nested_dtype",
        "nested_offset",
    ]

    def __init__(
        self,
        absmax,
        shape=None,
        code=None,
        blocksize=None,
        quant_type=None,
        dtype=None,
        offset=None,
        state2=None,
    ):
        self.absmax = absmax
        self.shape = shape
        self.code = code
        self.dtype = dtype
        self.blocksize = blocksize
        self.quant_type = quant_type
        self.offset = offset
        self.state2 = state2
        self.nested = state2 is not None

    def __getattr__(self, name: str) -> Any:
        # FSDP resolves the state-dict key "weight.quant_state.bitsandbytes__nf4" attribute by attribute.
        if name == f"{_PACKED_PREFIX}{self.__dict__.get('quant_type')}":
            return self.as_dict(packed=True)["quant_state." + name]
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    def __getitem__(self, idx):
        """Item `idx` of the list form that came before this class and that older callers still index."""
        nested = [self.offset, self.state2] if self.nested else None
        return [self.absmax, self.shape, self.dtype, self.blocksize, nested, self.quant_type][idx]

    @classmethod
    def from_dict(cls, qs_dict: dict[str, Any], device: torch.device) -> "QuantState":
        """Build a state from `as_dict`'s result in either form, on `device`.

        Args:
            qs_dict: Keys may carry any dotted prefix ("model.layers.0.mlp.up_proj.weight.absmax"). Not changed.
            device: Where the tensors go; the packed item may lie anywhere.

        Raises:
            ValueError: There is neither a packed item nor a `quant_type`, more than one packed item, a packed item
                of an unknown type, or an unknown key.
        """
        packed = [key for key, value in qs_dict.items() if "quant_state" in key and isinstance(value, torch.Tensor)]
        if "quant_type" not in qs_dict and not packed:
            raise ValueError("Expected packed or unpacked quant_state items, found neither")
        if packed and (len(packed) != 1 or packed[0].split(".")[-1] not in cls.valid_qs_type_keys):
            raise ValueError(
                f"QuantState.from_dict: there must be exactly one packed item ending in one of "
                f"{cls.valid_qs_type_keys}, got {packed}"
            )
        items = {key.split(".")[-1]: value for key, value in qs_dict.items() if key not in packed}
        for key in packed:
            items.update(unpack_tensor_to_dict(qs_dict[key]))
        unknown = sorted(set(items).difference(cls.valid_qs_keys))
        if unknown:
            raise ValueError(f"QuantState.from_dict: keys must be among {cls.valid_qs_keys}, got {unknown}")

        offset, state2 = None, None
        if "nested_absmax" in items:
            offset = torch.tensor(float(items["nested_offset"]), dtype=torch.float32, device=device)
            state2 = cls(
                absmax=items["nested_absmax"].to(device),
                blocksize=items["nested_blocksize"],
                code=items["nested_quant_map"].to(device),
                dtype=getattr(torch, items["nested_dtype"]),
            )
        return cls(
            quant_type=items["quant_type"],
            absmax=_row_major(items["absmax"], items["shape"], items["blocksize"]).to(device),
            blocksize=items["blocksize"],
            code=items["quant_map"].to(device),
            dtype=getattr(torch, items["dtype"]),
            shape=torch.Size(items["shape"]) if items["shape"] is not None else None,
            offset=offset,
            state2=state2,
        )

    def as_dict(self, packed: bool = False) -> dict[str, Any]:
        """The state as a flat dict.

        Args:
            packed: Gather everything that is not a tensor in one uint8 tensor, as checkpoints hold it.
        """
        items = {
            "quant_type": self.quant_type,
            "absmax": self.absmax,
            "blocksize": self.blocksize,
            "quant_map": self.code,
            "dtype": _name(self.dtype),
            "shape": tuple(self.shape) if self.shape is not None else None,
        }
        if self.nested:
            items |= {
                "nested_absmax": self.state2.absmax,
                "nested_blocksize": self.state2.blocksize,
                # A copy: safetensors refuses tensors that share storage, and layers may share the map.
                "nested_quant_map": self.state2.code.clone(),
                "nested_dtype": _name(self.state2.dtype),
                "nested_offset": self.offset.item(),
            }
        if not packed or self.quant_type is None:
            return items
        tensors = {key: value for key, value in items.items() if isinstance(value, torch.Tensor)}
        others = {key: value for key, value in items.items() if not isinstance(value, torch.Tensor)}
        return tensors | {f"quant_state.{_PACKED_PREFIX}{self.quant_type}": pack_dict_to_tensor(others)}

    def to(self, device) -> "QuantState":
        """Move every tensor to `device`, in place, and return the state. A shallow copy's own tensors stay put."""
        self.absmax = self.absmax.to(device)
        if self.code is not None:
            self.code = self.code.to(device)
        if self.nested:
            self.offset = self.offset.to(device)
            self.state2 = copy.copy(self.state2).to(device)
        return self

    def __eq__(self, other):
        def same(a, b):
            if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
                return a.device == b.device and a.dtype == b.dtype and torch.equal(a, b)
            return type(a) is type(b) and a == b

        if not isinstance(other, QuantState):
            return NotImplemented
        return all(
            same(getattr(self, name), getattr(other, name))
            for name in ("absmax", "code", "dtype", "blocksize", "quant_type", "offset", "state2")
        ) and tuple(self.shape or ()) == tuple(other.shape or ())

    __hash__ = None  # type: ignore[assignment]  # mutable


def resolve_quant_type(op: str, state: QuantState, requested: str | None) -> str:
    """The type to decode `state` with: its own. Asking for another one by name is an error."""
    if requested is not None and requested != state.quant_type:
        raise ArgumentError(op, "quant_type", f"'{state.quant_type}', the type of quant_state", f"'{requested}'")
    if state.quant_type not in QUANT_TYPES:
        raise ArgumentError(op, "the quant_type of quant_state", f"one of {', '.join(QUANT_TYPES)}", state.quant_type)
    return state.quant_type
