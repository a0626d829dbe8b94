"""Storage formats. A format is remembered and has no effect: elements stay in row-major order."""

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ._registry import LIBRARY

_ND = 2
_formats = WeakTensorKeyDictionary()

_OPTIONS = "*, int? customize_dtype=None, int? input_dtype=None"
LIBRARY.define(f"npu_format_cast(Tensor self, int acl_format, {_OPTIONS}) -> Tensor")
LIBRARY.define(f"npu_format_cast_.acl_format(Tensor(a!) self, int acl_format, {_OPTIONS}) -> Tensor(a!)")
LIBRARY.define("get_npu_format(Tensor self) -> int")


def _cast(self, acl_format, *, customize_dtype=None, input_dtype=None):
    result = self.clone(memory_format=torch.contiguous_format)
    return _cast_in_place(result, acl_format)


def _cast_in_place(self, acl_format, *, customize_dtype=None, input_dtype=None):
    _formats[self] = acl_format
    return self


def _format(self):
    return _formats.get(self, _ND)


for _name, _kernel in {
    "npu_format_cast": _cast,
    "npu_format_cast_.acl_format": _cast_in_place,
    "get_npu_format": _format,
}.items():
    LIBRARY.impl(_name, _kernel, "PrivateUse1")
