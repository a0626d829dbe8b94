"""`import bitsandbytes.integrations.accelerate` lets `accelerate.utils.load_and_quantize_model` use Ascend NPUs.

Otherwise it stops with "No GPU found" unless a `device_map` is given, and always for a model that is loaded already.
Training with `Accelerator` needs none of this. See docs/integrations.md.
"""

from accelerate.utils import bnb

from ._gates import open_gates

open_gates(
    "accelerate",
    ("1.10", "1.11", "1.12", "1.13", "1.14", "1.15"),
    [(bnb, "load_and_quantize_model"), (bnb, "get_quantized_model_device_map")],
)
