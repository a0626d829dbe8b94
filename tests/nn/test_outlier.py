"""`OutlierAwareLinear` and the tracer that tells it which input dimensions hold outliers."""

import pytest
import torch

from bitsandbytes.errors import UnsupportedError
from bitsandbytes.nn import OutlierAwareLinear
from bitsandbytes.utils import OutlierTracer, find_outlier_dims

from .helpers import randn


class Rounded(OutlierAwareLinear):
    """Rounds its weight except for the outlier columns."""

    def quantize_weight(self, w, outlier_idx):
        rounded = w.round()
        if outlier_idx is not None:
            rounded[:, outlier_idx] = w[:, outlier_idx]
        return rounded

    def forward_with_outliers(self, x, outlier_idx):
        self.seen = outlier_idx
        return torch.nn.functional.linear(x, self.weight, self.bias)


@pytest.fixture
def tracer(monkeypatch):
    monkeypatch.setattr(OutlierTracer, "_instance", None)
    return OutlierTracer.get_instance()


def weight_with_outlier(column):
    weight = randn(64, 32)
    weight[:, column] *= 50
    return weight


def test_quantizes_once_and_passes_the_outliers_on(tracer):
    layer = Rounded(32, 64)
    layer.weight.data = weight_with_outlier(3)
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), layer)
    tracer.initialize(model)
    expected = layer.quantize_weight(layer.weight.data, torch.tensor([3]))
    with torch.no_grad():
        for _ in range(2):
            x = randn(4, 32)
            y = model(x)
    assert layer.seen.tolist() == [3] and layer.is_quantized
    assert torch.equal(layer.weight, expected)
    assert torch.equal(y, torch.nn.functional.linear(model[0](x), expected, layer.bias))


def test_a_subclass_must_say_how(tracer):
    with torch.no_grad(), pytest.raises(UnsupportedError, match="quantize_weight"):
        OutlierAwareLinear(8, 8)(randn(2, 8))
    with pytest.raises(NotImplementedError, match="forward_with_outliers"):
        OutlierAwareLinear(8, 8).forward_with_outliers(randn(2, 8), None)


def test_the_tracer_notes_outliers_on_the_first_call_and_then_steps_aside(tracer):
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 64))
    model[1].weight.data = weight_with_outlier(7)
    assert not tracer.is_initialized() and tracer.get_outliers(model[0].weight) is None
    tracer.initialize(model)
    assert tracer.get_outliers(model[0].weight) is None
    x = randn(16, 32)
    x[:, 20] = 9.0  # the first layer goes by its input, the others by their weight
    model(x)
    assert tracer.get_outliers(model[0].weight).tolist() == [20]
    assert tracer.get_outliers(model[1].weight).tolist() == [7]
    model(x)
    assert not model[0]._forward_pre_hooks and not model[1]._forward_pre_hooks
    with pytest.raises(RuntimeError, match="get_instance"):
        OutlierTracer()


def test_outlier_dimensions_by_spread_by_count_and_at_random():
    weight = weight_with_outlier(5)
    assert find_outlier_dims(weight).tolist() == [5]
    assert find_outlier_dims(weight, topk=1).tolist() == [5]
    assert find_outlier_dims(weight, topk=4, rdm=True).shape == (4,)
