"""`python -m bitsandbytes info`: what is installed, what runs where, and a self-test."""

import argparse
from importlib.metadata import PackageNotFoundError, version
import json
import platform
import sys
from typing import Any

import torch

import bitsandbytes
from bitsandbytes import _env, backends
from bitsandbytes._ops import implementations
from bitsandbytes.cli import selftest

_PACKAGES = ("torch", "torch_npu", "transformers", "accelerate", "peft", "diffusers")


def versions() -> dict[str, str]:
    """Versions of this package, of Python and of the installed packages that matter; none of them is imported."""
    found = {
        "bitsandbytes": bitsandbytes.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def devices() -> list[torch.device]:
    """The CPU and every card of the accelerator that PyTorch finds."""
    found = [torch.device("cpu")]
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        assert kind is not None  # an available accelerator has a type
        found += [torch.device(kind.type, index) for index in range(torch.accelerator.device_count())]
    return found


def operators(device_type: str) -> dict[str, str]:
    """Operator -> the implementation that a tensor of `device_type` reaches."""
    key = {"cpu": "CPU", "npu": "PrivateUse1"}.get(device_type, device_type.upper())
    found = {
        op: by_key.get(key) or by_key.get("CompositeExplicitAutograd", "none")
        for op, by_key in sorted(implementations.items())
    }
    return {op: _tiers(op) if name == "npu" else name for op, name in found.items()}


def _tiers(op: str) -> str:
    """The tiers of an operator on the NPU, best first, and why others do not run on this chip."""
    from bitsandbytes.backends import npu

    tiers = npu.overview(op)
    refused = [f"not {tier}: {why}" for tier, why in tiers.items() if why]
    return "; ".join([", else ".join(tier for tier, why in tiers.items() if not why), *refused])


def npu_chip() -> dict[str, Any] | None:
    """The chip of this process and what it can do; None where the backend's status says why there is none."""
    if not backends.status()["npu"][0]:
        return None
    import torch_npu

    from bitsandbytes.backends import npu

    chip = npu.chip()
    return {
        "name": chip.name,
        "family": chip.family,
        "dtypes": [str(dtype).removeprefix("torch.") for dtype in chip.dtypes],
        "simulated": getattr(torch_npu, "is_simulated", False),
        "tiers": _env.NPU_IMPL or "best first",
    }


def native_cpu() -> dict[str, Any] | None:
    """The CPU's native library and how it runs; None where the backend's status says why there is none."""
    if not backends.status()["cpu"][0]:
        return None
    from bitsandbytes.backends import cpu

    return {
        "library": cpu.path(),
        "instructions": cpu.target(),
        "chosen_by": "BNB_CPU_TARGET" if _env.CPU_TARGET else "this machine",
        "available": list(cpu.targets()),
        "threads": torch.get_num_threads(),
        "threading": cpu.threading(),
    }


def report() -> dict[str, Any]:
    """Everything the command shows. `cause` is the first thing that is wrong, None on a healthy host."""
    present = devices()
    tests = {str(device): selftest.run(device) for device in present}
    wrong = [f"{device}: {name}: {why}" for device, checks in tests.items() for name, why in checks.items() if why]
    return {
        "versions": versions(),
        "devices": [str(device) for device in present],
        "backends": {name: {"available": ok, "why_not": why} for name, (ok, why) in backends.status().items()},
        "native_cpu": native_cpu(),
        "npu": npu_chip(),
        "operators": {kind: operators(kind) for kind in dict.fromkeys(device.type for device in present)},
        "self_test": {
            device: {name: {"passed": not why, "why_not": why} for name, why in checks.items()}
            for device, checks in tests.items()
        },
        "healthy": not wrong,
        "cause": wrong[0] if wrong else None,
    }


def _print_section(title: str, rows: dict[str, str]) -> None:
    width = max(map(len, rows), default=0)
    print(title)
    for name, value in rows.items():
        print(f"  {name:<{width}}  {value}")
    print()


def _print_report(found: dict[str, Any]) -> None:
    _print_section("Versions", found["versions"])
    _print_section(
        "Backends",
        {
            name: "available" if backend["available"] else f"not available: {backend['why_not']}"
            for name, backend in found["backends"].items()
        },
    )
    if native := found["native_cpu"]:
        rows = {
            "library": native["library"],
            "instructions": f"{native['instructions']}, chosen by {native['chosen_by']}",
            "available": ", ".join(native["available"]),
            "threads": f"at most {native['threads']} of {native['threading']}",
        }
        _print_section("Native CPU library", rows)
    if chip := found["npu"]:
        rows = {
            "chip": f"{chip['name']}, simulated" if chip["simulated"] else chip["name"],
            "family": chip["family"],
            "dtypes": ", ".join(chip["dtypes"]),
            "tiers": f"BNB_NPU_IMPL={chip['tiers']}" if _env.NPU_IMPL else chip["tiers"],
        }
        _print_section("Ascend NPU", rows)
    for kind, chosen in found["operators"].items():
        _print_section(f"Operators on {kind}", chosen)
    for device, checks in found["self_test"].items():
        _print_section(
            f"Self-test on {device}",
            {name: "ok" if check["passed"] else f"FAILED: {check['why_not']}" for name, check in checks.items()},
        )
    print("All is well." if found["healthy"] else f"Something is wrong: {found['cause']}")


def run(options: argparse.Namespace) -> int:
    """Print the report; 0 on a healthy host, 1 with the cause in the last line otherwise."""
    found = report()
    if options.json:
        print(json.dumps(found, indent=2))
        if not found["healthy"]:
            print(f"Something is wrong: {found['cause']}", file=sys.stderr)
    else:
        _print_report(found)
    return 0 if found["healthy"] else 1
