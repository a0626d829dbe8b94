"""Write tests/simulator/aten_without_kernel.txt from the torch_npu that is importable: `make aten-without-kernel`.

An ATen operator is in the file if the dispatcher sends it, on a tensor of the device, to torch_npu's fallback, which
copies the arguments to the host and calls the CPU's kernel. The functional and in-place forms of a structured operator
count like their out= form, through which PyTorch runs them. Other composites are not in the file: they consist of
operators that are looked at by themselves.
"""

from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
import re

import torch

FILE = Path(__file__).parents[1] / "aten_without_kernel.txt"

_ROUTE = re.compile(r"^PrivateUse1: registered at .*/(\w+)\.cpp:\d+ \[(.+)\]$", re.MULTILINE)


def _route(name: str) -> tuple[str, str]:
    """Where the kernel that the dispatcher runs on the device comes from: source file without extension, kind."""
    found = _ROUTE.search(torch._C._dispatch_dump_table(name))
    return (found[1], found[2]) if found else ("", "")


def _inputs(schema: torch._C.FunctionSchema) -> list[str]:
    return [str(argument.type) for argument in schema.arguments if not argument.is_out]


def without_kernel() -> list[str]:
    """The names, as `aten::name.overload`, sorted."""
    routes = {name: _route(name) for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")}
    missing = {name for name, (_, kind) in routes.items() if kind == "backend fallback"}

    out_forms = defaultdict(list)
    for name in missing:
        schema = torch._C._get_schema(*name.partition(".")[::2])
        if any(argument.is_out for argument in schema.arguments):
            out_forms[schema.name].append(_inputs(schema))
    for name, (file, _) in routes.items():
        if file.startswith("RegisterCompositeExplicitAutogradNonFunctional"):  # structured operators are among these
            base, _, overload = name.partition(".")
            if _inputs(torch._C._get_schema(base, overload)) in out_forms[base.removesuffix("_")]:
                missing.add(name)
    return sorted(missing)


def content() -> str:
    return (
        f"# ATen operators for which torch_npu {version('torch-npu')} has no kernel: it runs them on the host.\n"
        "# Made by tests/simulator/cann/aten_without_kernel.py, which says what counts.\n"
        + "".join(f"{name}\n" for name in without_kernel())
    )


if __name__ == "__main__":
    import torch_npu  # noqa: F401  registers its kernels

    FILE.write_text(content())
