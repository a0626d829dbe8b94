"""`import bitsandbytes.integrations.diffusers` lets diffusers quantise models on Ascend NPUs.

diffusers' `BitsAndBytesConfig`, 4-bit and 8-bit, otherwise stops with "No GPU found". See docs/integrations.md.
"""

from diffusers.quantizers.bitsandbytes.bnb_quantizer import BnB4BitDiffusersQuantizer, BnB8BitDiffusersQuantizer

from ._gates import open_gates

open_gates(
    "diffusers",
    ("0.35", "0.36", "0.37", "0.38", "0.39", "0.40", "0.41", "0.42"),
    [
        (BnB4BitDiffusersQuantizer, "validate_environment"),
        (BnB4BitDiffusersQuantizer, "update_device_map"),
        (BnB4BitDiffusersQuantizer, "_dequantize"),
        (BnB8BitDiffusersQuantizer, "validate_environment"),
        (BnB8BitDiffusersQuantizer, "update_device_map"),
    ],
)
