"""Kernels compiled for AMX, on a processor that need not have it: `amx_emulator.cpp` computes each of its instructions.

As a plugin it lets any tests run by them: `make test-amx`.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from psigrad.kernels import build, kernels, processor

SOURCE = Path(build.__file__).parent
INSTRUCTIONS = ("ldtilecfg", "tilerelease", "tilezero", "tileloadd", "tilestored", "tdpbf16ps")
_FOLDER, _EMULATED = pytest.StashKey[tempfile.TemporaryDirectory[str]](), pytest.StashKey["Emulator"]()
_EMULATOR = "-O2 -ftree-vectorize -mavx2 -mfma -ffp-contract=off -fPIC -shared -std=c++17"


class Emulator:
    """The emulator, loaded for the life of this process. Where the processor has AMX, it computes nothing."""

    def __init__(self, folder: Path) -> None:
        _compile(*_EMULATOR.split(), Path(__file__).with_name("amx_emulator.cpp"), "-o", folder / "emulator.so")
        self.library = ctypes.CDLL(str(folder / "emulator.so"), ctypes.RTLD_GLOBAL)

    def kernels(self, folder: Path, sources: Sequence[str], change: tuple[str, str] | None = None) -> ctypes.CDLL:
        """The library of these sources for a processor with AMX, and for this process alone; with `change` the second text
        stands in the place of the first.
        """
        for path in (*SOURCE.glob("*.h"), *(SOURCE / name for name in sources)):
            text = path.read_text()
            (folder / path.name).write_text(text.replace(*change) if change else text)
        assert not change or any(change[1] in path.read_text() for path in folder.glob("*.*")), change
        march, _ = processor.LEVELS["x86_64"]["x86-64-v4-amx"]
        more = ["-O1"] if change else []  # what is wrong need not be fast
        more.append("-Dsyscall=amx_syscall")  # who asks Linux for tiles asks the emulator
        paths = [folder / name for name in sources]
        _compile(*build.PORTABLE, *march.split(), *more, "-shared", *paths, "-o", folder / "kernels.so")
        return ctypes.CDLL(str(folder / "kernels.so"))

    @property
    def computed(self) -> dict[str, int]:
        """How often each instruction was emulated."""
        return dict(zip(INSTRUCTIONS, (ctypes.c_ulong * len(INSTRUCTIONS)).in_dll(self.library, "amx_counts"), strict=True))

    @property
    def error(self) -> str:
        """What a processor would have refused."""
        said = ctypes.c_char_p.in_dll(self.library, "amx_error").value
        return (said or b"").decode()

    def refuse(self, refused: bool) -> None:
        """Whether libraries that are loaded from here on are refused tiles."""
        ctypes.c_int.in_dll(self.library, "amx_refused").value = refused


def pytest_configure(config: pytest.Config) -> None:
    """Let all kernels of this process be those for AMX."""
    folder = Path(config.stash.setdefault(_FOLDER, tempfile.TemporaryDirectory()).name)
    emulator = config.stash[_EMULATED] = Emulator(folder)
    library = emulator.kernels(folder, build.SOURCES)
    kernels.library = lambda: library


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """What a processor would have refused fails the session."""
    emulator = session.config.stash[_EMULATED]
    print(f"\nby AMX: {emulator.computed}; {emulator.error or 'nothing that a processor would refuse'}")
    if emulator.error:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _compile(*given: str | Path) -> None:
    subprocess.run([str(build.compiler()), *map(str, given)], check=True, capture_output=True, text=True)
