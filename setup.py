"""Wheels with compiled kernels: `PSIGRAD_PREBUILD=1 pip wheel .` compiles them for every level of this kind of machine.

Without the variable the wheel is one for any machine, and kernels are compiled on first use where a compiler is.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent))
from psigrad.kernels import build, processor

PREBUILD = os.environ.get("PSIGRAD_PREBUILD") == "1"
SOURCE = Path(build.__file__).parent


def compile_level(march: str, target: Path) -> None:
    """Compile the kernels for one level. Linked without -fopenmp: torch's OpenMP is there when they are loaded."""
    program = build.compiler() or "g++"
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = {SOURCE / name: Path(folder) / f"{name}.o" for name in build.SOURCES}
        command = [program, *build.PORTABLE, *march.split(), "-c"]
        list(pool.map(lambda pair: subprocess.run([*command, pair[0], "-o", pair[1]], check=True), objects.items()))
        target.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([program, "-shared", "-s", *objects.values(), "-o", target], check=True)


class BuildWithKernels(build_py):
    """Puts the kernels beside their sources."""

    def run(self) -> None:
        """Copy the packages, then compile."""
        super().run()
        for name, (march, _) in processor.LEVELS.get(platform.machine(), {}).items() if PREBUILD else ():
            compile_level(march, Path(self.build_lib, "psigrad/kernels/prebuilt", f"{name}.so"))


class PlatformWheel(bdist_wheel):
    """A wheel for this machine and any Python 3: its library is code for a processor, not for an interpreter."""

    def get_tag(self) -> tuple[str, str, str]:
        """The tags of its name."""
        return ("py3", "none", super().get_tag()[2]) if PREBUILD else super().get_tag()


class Packages(Distribution):
    """What is packed."""

    def has_ext_modules(self) -> bool:
        """Whether it holds code for one kind of machine."""
        return PREBUILD


setup(distclass=Packages, cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel})
