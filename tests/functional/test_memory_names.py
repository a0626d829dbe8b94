"""Names around pointers and paged memory that other packages import."""

import ctypes

import pytest
import torch

from bitsandbytes.errors import ArgumentError
import bitsandbytes.functional as F


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8], ids=str)
def test_paged_tensors_are_marked_and_ordinary_otherwise(dtype, device):
    tensor = F.get_paged(3, 4, dtype=dtype, device=torch.device(device))
    assert tensor.is_paged
    assert (tensor.shape, tensor.dtype, tensor.device.type) == ((3, 4), dtype, torch.device(device).type)
    F.prefetch_tensor(tensor)
    F.prefetch_tensor(tensor, to_cpu=True)
    F.fill(tensor, 7)
    assert (tensor == 7).all()


def test_prefetching_what_is_not_paged_is_refused():
    with pytest.raises(ArgumentError, match="prefetch_tensor: A must be"):
        F.prefetch_tensor(torch.ones(3))


def test_elementwise_functions():
    tensor = F.get_paged(2, 3, device=torch.device("cpu"))
    F.elementwise_func("arange", tensor, None, 0)
    assert tensor.flatten().tolist() == [0, 1, 2, 3, 4, 5]
    F.elementwise_func("_mul", tensor, torch.full((2, 3), 2.0), 0)
    assert tensor.flatten().tolist() == [0, 2, 4, 6, 8, 10]
    F.elementwise_func("fill", tensor, None, 1.5)
    assert (tensor == 1.5).all()


def test_the_page_manager_is_one_per_process():
    manager = F.GlobalPageManager.get_instance()
    assert F.GlobalPageManager.get_instance() is manager
    with pytest.raises(RuntimeError, match="get_instance"):
        F.GlobalPageManager()
    tensors = [F.get_paged(2, device=torch.device("cpu")) for _ in range(2)]
    manager.paged_tensors.extend(tensors)
    try:
        manager.prefetch_all()
        manager.prefetch_all(to_cpu=True)
    finally:
        del manager.paged_tensors[-2:]


def test_pointers():
    tensor = torch.arange(4.0)
    assert F.get_ptr(None) is None
    pointer = F.get_ptr(tensor[1:])
    assert isinstance(pointer, ctypes.c_void_p)
    assert pointer.value == tensor.data_ptr() + 4


class TestIsOnGpu:
    def test_refuses_the_cpu(self):
        with pytest.raises(RuntimeError, match="cpu"):
            F.is_on_gpu([torch.ones(2)])

    def test_refuses_two_devices(self):
        with pytest.raises(RuntimeError):
            F.is_on_gpu([torch.ones(2, device="meta"), torch.ones(2)])

    def test_accepts_one_device_none_and_paged_tensors(self):
        paged = F.get_paged(2, device=torch.device("cpu"))
        assert F.is_on_gpu([torch.ones(2, device="meta"), None, paged]) is True
        assert F.is_on_gpu([]) is True
