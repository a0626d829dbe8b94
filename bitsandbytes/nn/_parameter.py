"""What 4-bit and int8 parameters share: their metadata travels with their data.

A quantised parameter is bytes plus what decodes them. Each way in which PyTorch and other libraries copy, move, cut
or replace a parameter must keep both together; this class does so in one place.
"""

import copy
from typing import Any

import torch
from typing_extensions import Self

# Functions of a parameter whose tensors are parameters of the same class with the same metadata. FSDP2 shards with
# chunk and split; torch.nn.Parameter() and Module.to() call detach.
_KEEP = frozenset({torch.chunk, torch.split, torch.detach, torch.Tensor.chunk, torch.Tensor.split, torch.Tensor.detach})
# Of a quantised one these too. A clone of a weight still in floating point is a plain tensor, not a second weight
# that the next move would quantise.
_KEEP_QUANTIZED = frozenset({torch.clone, torch.Tensor.clone, torch.Tensor.view})


def _new(cls: type, data: torch.Tensor, requires_grad: bool) -> Any:
    return torch.Tensor._make_subclass(cls, data, requires_grad)


class QuantizedParameter(torch.nn.Parameter):
    """Base of `Params4bit` and `Int8Params`.

    `__dict__` holds nothing but arguments of the constructor (and what other libraries put there), because they
    build a new parameter with `type(p)(data, requires_grad=..., **p.__dict__)`.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        """Assigning another quantised parameter to `data` takes over what decodes it as well.

        `Module.to()` assigns the moved parameter to the `data` of the one it holds, so this is how a module's own
        parameter gets quantised and moved. A property would do, but torch.compile cannot trace its getter.
        """
        super().__setattr__(name, value)
        if name == "data":
            if type(value) is type(self):
                self._adopt(value)
            self._data_changed()

    def _adopt(self, other: Any) -> None:
        """Take over what decodes the data of `other`."""
        raise NotImplementedError

    def _data_changed(self) -> None:
        """Renew attributes that refer to the data."""

    def _is_quantized(self) -> bool:
        raise NotImplementedError

    def _needs_quantization(self) -> bool:
        """Whether a move to a real device quantises."""
        raise NotImplementedError

    def _quantize(self, device: torch.device) -> Self:
        """A new quantised parameter on `device`."""
        raise NotImplementedError

    def _moved(self, data: torch.Tensor) -> Self:
        """A new parameter for the same values in `data`, which lies elsewhere or has another dtype."""
        raise NotImplementedError

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """As `torch.Tensor.to`, except that a move to a device that holds data quantises what is not quantised yet.

        That is so too when the data is on that device already. Codes are never cast: a dtype has no effect on a
        quantised parameter. This parameter itself stays as it is.
        """
        copy_data = kwargs.pop("copy", False)
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        if device is not None and device.type != "meta" and self._needs_quantization():
            return self._quantize(device)
        data = self.data
        moved = data.to(
            device=data.device if device is None else device,
            dtype=data.dtype if dtype is None or self._is_quantized() else dtype,
            non_blocking=non_blocking,
            copy=copy_data,
        )
        return self if moved is data else self._moved(moved)

    def cpu(self) -> Self:  # type: ignore[override]
        return self.to(device="cpu")

    def cuda(self, device: Any = None, non_blocking: bool = False) -> Self:  # type: ignore[override]
        return self.to(device="cuda" if device is None else device, non_blocking=non_blocking)

    def xpu(self, device: Any = None, non_blocking: bool = False) -> Self:  # type: ignore[override]
        return self.to(device="xpu" if device is None else device, non_blocking=non_blocking)

    def npu(self, device: Any = None, non_blocking: bool = False) -> Self:
        return self.to(device="npu" if device is None else device, non_blocking=non_blocking)

    def _cast(self, dtype: torch.dtype) -> Self:
        return self.to(dtype=dtype)

    # Module.half() and its like call these, and would turn packed codes in a floating storage dtype into noise.
    def half(self) -> Self:
        return self._cast(torch.float16)

    def bfloat16(self) -> Self:
        return self._cast(torch.bfloat16)

    def float(self) -> Self:
        return self._cast(torch.float32)

    def double(self) -> Self:
        return self._cast(torch.float64)

    def __copy__(self) -> Self:
        other = _new(type(self), self.data, self.requires_grad)
        other.__dict__.update(self.__dict__)
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        other = _new(type(self), copy.deepcopy(self.data, memo), self.requires_grad)
        memo[id(self)] = other
        for name, value in self.__dict__.items():
            # The module a parameter belongs to is copied only if the copy began with it.
            copied = memo.get(id(value), value) if isinstance(value, torch.nn.Module) else copy.deepcopy(value, memo)
            other.__dict__[name] = copied
        other._data_changed()
        return other

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return _new, (type(self), self.data, self.requires_grad), self.__dict__

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._data_changed()

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        if func not in _KEEP and func not in _KEEP_QUANTIZED:
            return result
        source = args[0]
        if not isinstance(source, cls) or (func in _KEEP_QUANTIZED and not source._is_quantized()):
            return result

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dtype != source.dtype:
                return tensor
            other = _new(cls, tensor, source.requires_grad and tensor.requires_grad)
            other.__dict__.update(source.__dict__)
            other._data_changed()
            return other

        return tuple(map(keep, result)) if isinstance(result, (tuple, list)) else keep(result)
