"""Storage formats. A format is remembered and has no effect: elements stay in row-major order."""

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ._registry import LIBRARY, define

_ND = 2
_formats = WeakTensorKeyDictionary()


def _cast(input, acl_format, *, customize_dtype=None, input_dtype=None):
    return _cast_in_place(input.clone(memory_format=torch.contiguous_format), acl_format)


def _cast_in_place(input, acl_format, *, customize_dtype=None, input_dtype=None):
    _formats[input] = acl_format
    return input


def _format(input):
    return _formats.get(input, _ND)


for _name, _kernel in {
    "npu_format_cast": _cast,
    "npu_format_cast_.acl_format": _cast_in_place,
    "get_npu_format": _format,
}.items():
    define(_name)
    LIBRARY.impl(_name, _kernel, "PrivateUse1")
