"""The kept kernels: a damaged or foreign library is never loaded, and compiled anew."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from kernel_choices import pretend_processor

from psigrad.cache_folder import cache_folder
from psigrad.kernels import build

pytestmark = pytest.mark.needs("compiler")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A cache with the library of this machine in it, which is compiled where it is not there yet."""
    home = tmp_path_factory.mktemp("cache")
    assert not isinstance(build.library(), str), "the compiler works here"
    kept = cache_folder("native") / f"{build._key(build.compiler())}.so"
    (home / "psigrad" / "native").mkdir(parents=True, mode=0o700)
    for file in (kept, kept.with_suffix(".sha256")):
        shutil.copy(file, home / "psigrad" / "native")
    return home


def loads(home: Path, **environment) -> str:
    """What `library()` says in a fresh process, or how the process ended."""
    code = "from psigrad.kernels.build import library; found = library();print(found if isinstance(found, str) else 'loaded')"
    root = str(Path(build.__file__).parents[2])
    given = {**os.environ, "XDG_CACHE_HOME": str(home), "PYTHONPATH": root, **environment}
    done = subprocess.run([sys.executable, "-c", code], env=given, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else f"ended by {done.returncode}: {done.stderr[-200:]}"


def test_on_a_file_system_without_locks_it_is_compiled_all_the_same(tmp_path, monkeypatch):
    """What another process is compiling there meanwhile is left alone."""

    def refuse(*given):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", refuse)
    (tmp_path / "tmp-of-another").mkdir()
    with build._lock(tmp_path):
        assert (tmp_path / "tmp-of-another").exists()
    monkeypatch.undo()
    with build._lock(tmp_path):
        assert not (tmp_path / "tmp-of-another").exists()


@pytest.fixture
def cache(compiled, tmp_path, monkeypatch):
    """A copy of the cache, where a "compiler" only notes that it was asked and gives the sound library."""
    shutil.copytree(compiled, tmp_path / "cache")
    folder = tmp_path / "cache" / "psigrad" / "native"
    (library,) = folder.glob("*.so")
    shutil.copy(library, tmp_path / "sound.so")
    # the key names the compiler's version, so it answers as the real one does
    real = shutil.which("g++") or shutil.which("clang++")
    (tmp_path / "c++").write_text(
        f'#!/bin/sh\nif [ "$1" = --version ]; then exec {real} --version; fi\n'
        f'echo asked >> {tmp_path}/asked\nfor last; do :; done\ncp {tmp_path}/sound.so "$last"\n'
    )
    (tmp_path / "c++").chmod(0o755)
    return tmp_path


def found_in(cache):
    (library,) = (cache / "cache" / "psigrad" / "native").glob("*.so")
    return library


def again(cache):
    """What is said, and whether it was compiled."""
    (cache / "asked").unlink(missing_ok=True)
    said = loads(cache / "cache", CXX=str(cache / "c++"))
    return said, (cache / "asked").exists()


def damage(how, library):
    content = library.read_bytes()
    if how == "truncated":
        library.write_bytes(content[: len(content) // 2])
    elif how == "empty":
        library.write_bytes(b"")
    elif how == "flipped":
        library.write_bytes(content[:5000] + bytes([content[5000] ^ 255]) + content[5001:])
    elif how == "no checksum":
        library.with_suffix(".sha256").unlink()
    elif how == "a link":
        library.rename(library.with_suffix(".real"))
        library.symlink_to(library.with_suffix(".real"))
    elif how == "others may write":
        library.chmod(0o666)
    elif how == "another owner":
        os.chown(library, 12345, 12345)
    elif how == "garbage":
        library.write_bytes(b"\x7fELF" + b"x" * 5000)


@pytest.mark.slow
def test_it_is_compiled_where_nothing_is_kept(tmp_path):
    """The fixture does the same on a machine that has not run psigrad yet."""
    assert loads(tmp_path) == "loaded"
    assert loads(tmp_path, CXX="/bin/false") != "loaded", "another compiler, another library"


def test_a_sound_library_is_loaded_as_it_is(cache):
    assert again(cache) == ("loaded", False)


@pytest.mark.parametrize(
    "how",
    [
        *("truncated", "empty", "flipped", "no checksum", "a link", "others may write", "garbage"),
        pytest.param("another owner", marks=pytest.mark.needs("root")),
    ],
)
def test_a_damaged_or_foreign_library_is_compiled_again(how, cache):
    damage(how, found_in(cache))
    assert again(cache) == ("loaded", True)
    assert again(cache) == ("loaded", False), "and is sound from then on"


def test_a_compiler_whose_library_is_wrong_is_noticed_before_it_is_kept(cache):
    found_in(cache).unlink()
    (cache / "sound.so").write_bytes(b"\x7fELF nothing")
    said, asked = again(cache)
    assert asked and "failed" in said
    assert not list((cache / "cache" / "psigrad" / "native").glob("*.so"))


@pytest.mark.needs("root")
def test_a_folder_of_another_user_is_refused(cache):
    os.chown(cache / "cache" / "psigrad" / "native", 12345, 12345)
    said, asked = again(cache)
    assert "belongs to another user" in said and not asked


def test_a_folder_that_others_may_write_to_is_closed_to_them(cache):
    folder = cache / "cache" / "psigrad" / "native"
    folder.chmod(0o777)
    assert again(cache)[0] == "loaded" and folder.stat().st_mode & 0o022 == 0


def test_leftovers_of_a_killed_compile_go_and_two_processes_compile_once(cache):
    folder = cache / "cache" / "psigrad" / "native"
    (folder / "tmpabc").mkdir()
    found_in(cache).unlink()
    (cache / "asked").unlink(missing_ok=True)
    code = "from psigrad.kernels.build import library; assert not isinstance(library(), str), library()"
    root = str(Path(build.__file__).parents[2])
    given = {**os.environ, "XDG_CACHE_HOME": str(cache / "cache"), "PYTHONPATH": root, "CXX": str(cache / "c++")}
    running = [subprocess.Popen([sys.executable, "-c", code], env=given) for _ in range(4)]
    assert [process.wait() for process in running] == [0] * 4
    assert (cache / "asked").read_text() == "asked\n" and not (folder / "tmpabc").exists()


def test_a_wheels_own_kernels_are_taken_for_the_best_level_of_this_processor(tmp_path, monkeypatch):
    monkeypatch.delenv(build.SWITCH, raising=False)  # a level that is forced here is none of those below
    monkeypatch.setattr(build.resources, "files", lambda package: tmp_path)
    monkeypatch.setattr(build, "levels", lambda: ["x86-64-v4", "x86-64-v3"])
    assert build.prebuilt() is None, "a checkout has none"
    (tmp_path / "prebuilt").mkdir()
    (tmp_path / "three.c").write_text("int three(void) { return 3; }")
    for level, text in (("x86-64-v4-bf16", "not for this processor"), ("x86-64-v3", "")):
        (tmp_path / "prebuilt" / f"{level}.so").write_text(text)
    command = [build.compiler(), "-shared", "-fPIC", "-x", "c", tmp_path / "three.c", "-o", tmp_path / "prebuilt/x86-64-v3.so"]
    subprocess.run(command, check=True)
    assert build.prebuilt().name == "x86-64-v3.so"
    monkeypatch.setattr(build, "compiler", lambda: None)
    build.library.cache_clear()
    try:
        assert build.library().three() == 3
    finally:
        build.library.cache_clear()
    (tmp_path / "prebuilt" / "x86-64-v4.so").write_text("damaged")
    assert build.prebuilt().name == "x86-64-v4.so"
    assert "no C++ compiler" in build.library(), "what cannot be loaded is left out, and said to be"
    build.library.cache_clear()


def test_a_level_is_for_processors_that_have_all_of_it(monkeypatch):
    from psigrad.kernels import processor

    avx512 = "avx512f avx512bw avx512cd avx512dq avx512vl"
    older = "avx2 bmi1 bmi2 f16c fma movbe"
    for machine, flags, found in (
        ("x86_64", f"{older} {avx512} avx512_bf16 amx_bf16 amx_tile", [f"x86-64-{v}" for v in ("v4-amx", "v4-bf16", "v4", "v3")]),
        ("x86_64", f"{older} {avx512} avx512_bf16 amx_int8 amx_tile", ["x86-64-v4-bf16", "x86-64-v4", "x86-64-v3"]),
        ("x86_64", f"{older} {avx512} avx512_bf16", ["x86-64-v4-bf16", "x86-64-v4", "x86-64-v3"]),
        ("x86_64", f"{older} {avx512}", ["x86-64-v4", "x86-64-v3"]),
        ("x86_64", f"{older} avx512f", ["x86-64-v3"]),
        ("x86_64", "avx2", []),
        ("aarch64", "fp asimd", ["armv8-a"]),
        ("riscv64", older, []),
    ):
        pretend_processor(monkeypatch, f"flags : {flags}", machine=machine)
        assert processor.levels() == found
