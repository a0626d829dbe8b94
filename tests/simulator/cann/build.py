"""Build stub CANN libraries under which a torch_npu wheel imports, and its kernels run without computing anything.

    python tests/simulator/cann/build.py <folder that holds torch_npu> <output folder>

libascendcl.so has everything: acl.cpp, and for each other C function that the wheel needs one that counts its calls and
returns success. The remaining libraries hold nothing of their own: they lead to it.
"""

from pathlib import Path
import re
import subprocess
import sys

HERE = Path(__file__).parent
FORWARDING = ("libhccl", "libacl_op_compiler", "libge_runner", "libgraph", "libacl_tdt_channel", "libopapi")
UNDEFINED = re.compile(r" U ((?:acl|rt[A-Z]|Msprof)\w+)$", re.MULTILINE)
# Operators (aclnnAdd, aclnnAddGetWorkspaceSize) and their arguments are looked up by name while the wheel runs.
NAMED = re.compile(rb"\0(aclnn[A-Z]\w+|acl(?:Create|Destroy)(?:Tensor|Scalar|BoolArray|IntArray|FloatArray)\w*)(?=\0)")
# So are these, without which it fails or warns.
LOOKED_UP = (
    "aclSetCompileopt",
    "aclrtCtxSetSysParamOpt",
    "aclrtDestroyStreamForce",
    "aclrtSetDeviceSatMode",
    "aclrtSetOpExecuteTimeOut",
    "aclrtSetStreamOverflowSwitch",
    "aclrtSynchronizeDeviceWithTimeout",
    "aclrtSynchronizeStreamWithTimeout",
)


def needed_symbols(package: Path) -> list[str]:
    """The C functions of CANN that `import torch_npu` and the operators need."""
    main = package / "lib/libtorch_npu.so"
    libraries = [main, package / "lib/libtensorpipe.so", *package.glob("_C.*.so")]
    listing = subprocess.run(["nm", "-D", "--undefined-only", *libraries], check=True, capture_output=True, text=True)
    named = {name.decode() for name in NAMED.findall(main.read_bytes())}
    return sorted({*UNDEFINED.findall(listing.stdout), *named, *LOOKED_UP})


def stub(name: str) -> str:
    """Weak, so that a definition in acl.cpp wins. Its parameters need no names: C callers clean up after themselves."""
    record = f'stub_record("{name}")'
    if name.startswith("aclnn") and name.endswith("GetWorkspaceSize"):
        record = f'stub_record_operator("{name.removesuffix("GetWorkspaceSize")}")'
    return f"__attribute__((weak)) long {name}() {{ {record}; return 0; }}\n"


def compile_library(name: str, out: Path, *arguments: str | Path) -> None:
    options = ["-O1", "-std=c++17", "-Wall", "-Werror", "-shared", "-fPIC", f"-Wl,-soname,{name}.so"]
    subprocess.run(["g++", *options, *arguments, "-o", out / f"{name}.so"], check=True)


def build(site: Path, out: Path) -> None:
    package = site / "torch_npu"
    out.mkdir(parents=True, exist_ok=True)
    rest = out / "rest.cpp"
    functions = "".join(map(stub, needed_symbols(package)))
    rest.write_text(
        f'extern "C" {{\nvoid stub_record(const char*);\nvoid stub_record_operator(const char*);\n{functions}}}\n'
    )
    # The vendor's headers, which are in the wheel, hold the definitions to the real signatures.
    compile_library("libascendcl", out, HERE / "acl.cpp", rest, f"-I{package / 'include/third_party/acl/inc'}")
    for name in FORWARDING:
        compile_library(name, out, "-Wl,--no-as-needed", f"-L{out}", "-lascendcl")


if __name__ == "__main__":
    build(Path(sys.argv[1]), Path(sys.argv[2]))
