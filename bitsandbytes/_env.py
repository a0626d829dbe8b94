"""Every environment variable that the package reads. They are read once, when the package is imported."""

import os

#: Instruction set of the native CPU kernels: a name that `python -m bitsandbytes info` lists; the best one if empty.
CPU_TARGET = os.environ.get("BNB_CPU_TARGET", "")

#: Tiers of implementations on the NPU, such as "default" or "int8_linear_matmul=torch_npu"; the best ones if empty.
#: Syntax: `backends/npu/_tiers.py`.
NPU_IMPL = os.environ.get("BNB_NPU_IMPL", "")
