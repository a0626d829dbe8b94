"""What the 4-bit and blockwise paths run on a device: nothing in float64, nothing that waits for the host.

On the CPU the reference stands for the devices: its own kernels are no operators that a recorder sees.
"""

import pytest
import torch

import bitsandbytes as bnb
import bitsandbytes.functional as F
from tests.cases.modes import Recorder
from tests.helpers import FLOATS, QUANT_TYPES, randn, reference_on_the_cpu
from tests.simulator.helpers import counted, only_simulated


def round_trip_4bit(x, quant_type, nested=False, storage=torch.uint8):
    packed, state = F.quantize_4bit(
        x, quant_type=quant_type, compress_statistics=nested, blocksize=32, quant_storage=storage
    )
    return F.dequantize_4bit(packed, state)


def round_trip_out(x, quant_type):
    packed, state = F.quantize_4bit(x, quant_type=quant_type)
    again = F.quantize_4bit(
        x, out=torch.empty_like(packed), absmax=torch.empty_like(state.absmax), quant_type=quant_type
    )
    return F.dequantize_4bit(*again, out=torch.empty_like(x))


def matmul(x, quant_type, nested=False):
    packed, state = F.quantize_4bit(x[:5], quant_type=quant_type, compress_statistics=nested)
    bias = torch.ones(5, dtype=x.dtype, device=x.device)
    bnb.matmul_4bit(x, packed.t(), quant_state=state, bias=bias)
    return F.gemv_4bit(x[:1], packed, state=state)


def round_trip_blockwise(x, quant_type, nested=False, code=None):
    codes, state = F.quantize_blockwise(x, code=code, blocksize=100, nested=nested)
    return F.dequantize_blockwise(codes, state, out=torch.empty_like(x))


CALLS = {
    "4-bit": round_trip_4bit,
    "4-bit nested": lambda x, t: round_trip_4bit(x, t, nested=True),
    "4-bit in float storage": lambda x, t: round_trip_4bit(x, t, storage=torch.bfloat16),
    "4-bit with out": round_trip_out,
    "4-bit of a transposed input": lambda x, t: round_trip_4bit(x.t(), t),
    "matmul": matmul,
    "matmul nested": lambda x, t: matmul(x, t, nested=True),
    "blockwise": round_trip_blockwise,
    "blockwise nested": lambda x, t: round_trip_blockwise(x, t, nested=True),
    "blockwise with a map": lambda x, t: round_trip_blockwise(x, t, code=torch.linspace(-1, 1, 256, device=x.device)),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("quant_type", QUANT_TYPES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_no_float64_and_no_host_synchronisation(dtype, quant_type, call, device):
    x = randn(6, 64, dtype=dtype, device=device)
    with reference_on_the_cpu():
        CALLS[call](x, quant_type)  # tables that are built once may be built on the host
        with Recorder() as recorder:
            result = CALLS[call](x, quant_type)
    assert len(recorder.names) > 20
    assert not recorder.faults
    assert result.device.type == torch.device(device).type


@only_simulated
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("quant_type", QUANT_TYPES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_nothing_passes_between_the_host_and_the_device(dtype, quant_type, call, device):
    x = randn(6, 64, dtype=dtype, device=device)
    CALLS[call](x, quant_type)  # copies the tables to the device, once
    with counted() as counts:
        CALLS[call](x, quant_type)
    assert counts.launches > 5
    assert counts.waits == counts.copies_to_device == 0, counts
    assert counts.stream_reads == 0, counts


@pytest.mark.parametrize(
    ("bad", "fault"),
    [
        (lambda x: x.double().sum(), "float64"),
        (lambda x: x.sum().item(), "aten::_local_scalar_dense"),
        (lambda x: bool(x.sum() > 0), "aten::_local_scalar_dense"),
        (lambda x: x.nonzero(), "aten::nonzero"),
        (lambda x: x[x > 0], "a boolean index"),
        (lambda x: torch.equal(x, x), "aten::equal"),
    ],
)
def test_the_recorder_notices(bad, fault, device):
    with Recorder() as recorder:
        bad(torch.ones(3, device=device))
    assert fault in recorder.faults
