"""A Linear layer that treats outlier dimensions of its weight apart; subclasses say how."""

import torch
from torch import nn

from ..errors import UnsupportedError
from ..utils import OutlierTracer


class OutlierAwareLinear(nn.Linear):
    """Base of layers that quantise their weight on the first forward, once `OutlierTracer` knows its outliers.

    A subclass overrides `quantize_weight` and `forward_with_outliers`.
    """

    def __init__(self, input_features, output_features, bias=True, device=None):
        super().__init__(input_features, output_features, bias, device)
        self.outlier_dim = None
        self.is_quantized = False

    def forward_with_outliers(self, x: torch.Tensor, outlier_idx: torch.Tensor | None) -> torch.Tensor:
        raise UnsupportedError(f"{type(self).__name__} must override forward_with_outliers(x, outlier_idx)")

    def quantize_weight(self, w: torch.Tensor, outlier_idx: torch.Tensor | None) -> torch.Tensor:
        raise UnsupportedError(f"{type(self).__name__} must override quantize_weight(w, outlier_idx)")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.outlier_dim is None:
            self.outlier_dim = OutlierTracer.get_instance().get_outliers(self.weight)
        if not self.is_quantized:
            self.weight.data.copy_(self.quantize_weight(self.weight, self.outlier_dim))
            self.is_quantized = True
        return self.forward_with_outliers(x, self.outlier_dim)
