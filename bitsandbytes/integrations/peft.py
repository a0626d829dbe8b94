"""`import bitsandbytes.integrations.peft` lets PEFT initialise LoRA weights with LoftQ on Ascend NPUs.

Otherwise `init_lora_weights="loftq"` and `replace_lora_weights_loftq` send every weight to CUDA. The rest of PEFT needs
none of this. See docs/integrations.md.
"""

from accelerate.utils import is_npu_available
from peft.utils import loftq_utils

from ._gates import open_gates

# PEFT asks `is_xpu_available()`; what that becomes must exist in its module.
loftq_utils.is_npu_available = is_npu_available

open_gates(
    "peft",
    ("0.17", "0.18", "0.19", "0.20", "0.21"),
    [(loftq_utils, "loftq_init"), (loftq_utils, "_loftq_init_new")],
)
