"""Builds the native CPU library with CMake; all else is declared in pyproject.toml.

CONTRIBUTING.md explains the environment variables BNB_BUILD_NATIVE and CMAKE_ARGS.
"""

import os
from pathlib import Path
import re
import shlex
import subprocess
from tempfile import TemporaryDirectory

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

NAME = "bitsandbytes.libbitsandbytes_cpu"
LIBRARY = NAME.replace(".", "/") + ".so"
REASON = NAME.replace(".", "/") + ".not-built.txt"  # bitsandbytes/backends/_native.py reads it


def first_error(output: str) -> str:
    """What went wrong according to CMake or a compiler, in one line."""
    found = re.search(r"^.*(?:\berror: |/ld: ).*$", output, re.MULTILINE) or re.search(
        r"CMake Error(?: at [^\n]*:|:)(.+?)(?=\n\n\n|\nCall Stack|\n-- |\nCMake Error|\Z)", output, re.DOTALL
    )
    text = found[found.re.groups] if found else (output.strip() or "no output").splitlines()[-1]
    return " ".join(text.split())


def why_not_built(package: Path) -> str:
    """Build the library into the folder `package`; gives the reason in one line if that fails, else nothing."""
    with TemporaryDirectory() as build:
        for command in (
            ["cmake", "-S", ".", "-B", build, "-DCMAKE_BUILD_TYPE=Release", *shlex.split(os.getenv("CMAKE_ARGS", ""))],
            ["cmake", "--build", build, "--parallel", str(os.cpu_count() or 1)],
            ["cmake", "--install", build, "--prefix", str(package), "--strip"],
        ):
            try:
                done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            except OSError as error:
                return f"CMake does not run: {error}"
            print(done.stdout)
            if done.returncode:
                return first_error(done.stdout)
    return ""


class BuildNative(build_ext):
    def run(self) -> None:
        mode = os.getenv("BNB_BUILD_NATIVE") or "auto"
        if mode not in ("auto", "require", "off"):
            raise CompileError(f"BNB_BUILD_NATIVE must be auto, require or off, got '{mode}'")
        places = [Path(self.build_lib)] + [Path()] * bool(self.inplace)
        for place in places:  # neither an old library nor an old reason survives
            (place / LIBRARY).unlink(missing_ok=True)
            (place / REASON).unlink(missing_ok=True)
        package = Path(self.build_lib, LIBRARY).parent
        package.mkdir(parents=True, exist_ok=True)
        reason = "left out by BNB_BUILD_NATIVE=off" if mode == "off" else why_not_built(package)
        if reason:
            Path(self.build_lib, REASON).write_text(reason + "\n")
            self.distribution.ext_modules = None
            self.get_finalized_command("bdist_wheel").root_is_pure = True
        for built, source in self.get_output_mapping().items():
            self.copy_file(built, source)
        if reason and mode == "require":
            raise CompileError(f"{LIBRARY} cannot be built: {reason}")
        if reason:
            self.warn(f"going on without {LIBRARY}: {reason}")

    def get_outputs(self) -> list[str]:
        return [str(path) for path in (Path(self.build_lib, name) for name in (LIBRARY, REASON)) if path.exists()]

    def get_output_mapping(self) -> dict[str, str]:
        """What an editable installation keeps in the source tree."""
        return {path: os.path.relpath(path, self.build_lib) for path in self.get_outputs()} if self.inplace else {}


class Wheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        # The library is loaded by ctypes: it depends on the platform, but neither on Python's ABI nor on PyTorch's.
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[Extension(NAME, sources=[])],  # makes the wheel one of a platform
    cmdclass={"build_ext": BuildNative, "bdist_wheel": Wheel},
)
