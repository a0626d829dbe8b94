"""Build stub ACL libraries under which an installed torch_npu wheel imports without CANN.

    python tests/simulator/cann/build.py <folder that holds torch_npu> <output folder>

libascendcl.so has everything: acl.cpp, and for each other C function that the wheel needs one that counts its call and
returns success. The remaining libraries hold nothing of their own: they lead to it.
"""

from pathlib import Path
import re
import subprocess
import sys

HERE = Path(__file__).parent
FORWARDING = ("libhccl", "libacl_op_compiler", "libge_runner", "libgraph", "libacl_tdt_channel")
# Functions that the wheel looks up while it runs, and fails without.
LOOKED_UP = ("aclSetCompileopt", "aclrtCtxSetSysParamOpt", "aclrtSetDeviceSatMode", "aclrtSetOpExecuteTimeOut")
C_FUNCTION = re.compile(r" U ((?:acl|rt[A-Z]|Msprof)\w+)$", re.MULTILINE)


def needed_symbols(package: Path) -> list[str]:
    """The functions of CANN that the libraries loaded by `import torch_npu` leave undefined."""
    libraries = [package / "lib/libtorch_npu.so", package / "lib/libtensorpipe.so", *package.glob("_C.*.so")]
    listing = subprocess.run(["nm", "-D", "--undefined-only", *libraries], check=True, capture_output=True, text=True)
    return sorted({*C_FUNCTION.findall(listing.stdout), *LOOKED_UP})


def stub(name: str) -> str:
    """Weak, so that a definition in acl.cpp wins. The callers' arguments are left alone, as C allows."""
    return f'__attribute__((weak)) int {name}() {{ stub_record("{name}"); return 0; }}\n'


def compile_library(name: str, out: Path, *arguments: str | Path) -> None:
    options = ["-O1", "-std=c++17", "-Wall", "-Werror", "-shared", "-fPIC", f"-Wl,-soname,{name}.so"]
    subprocess.run(["g++", *options, *arguments, "-o", out / f"{name}.so"], check=True)


def build(site: Path, out: Path) -> None:
    package = site / "torch_npu"
    out.mkdir(parents=True, exist_ok=True)
    rest = out / "rest.cpp"
    functions = "".join(map(stub, needed_symbols(package)))
    rest.write_text(f'extern "C" {{\nvoid stub_record(const char*);\n{functions}}}\n')
    # The vendor's headers, which are in the wheel, hold the definitions to the real signatures.
    compile_library("libascendcl", out, HERE / "acl.cpp", rest, f"-I{package / 'include/third_party/acl/inc'}")
    for name in FORWARDING:
        compile_library(name, out, "-Wl,--no-as-needed", f"-L{out}", "-lascendcl")


if __name__ == "__main__":
    build(Path(sys.argv[1]), Path(sys.argv[2]))
