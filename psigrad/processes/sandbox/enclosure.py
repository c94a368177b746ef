"""The bubblewrap command line for all untrusted code: a model's programs, and a user's environments and tools.

bubblewrap runs the process with no network, no capabilities, no uid 0, and a seccomp filter. The process can read only Python,
the system's libraries and the listed files, and reach only the listed sockets and FIFOs. Its process namespace ends with it.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from psigrad.processes.sandbox import seccomp
from psigrad.processes.sandbox.executor import TierName

# The environment of bwrap itself, without psigrad's variables: the process in the sandbox can read it.
BARE = {"PATH": os.environ.get("PATH", "/usr/bin:/bin")}
# User ids without an account: above those that login managers assign, or the highest of a container's. Each psigrad process has
# 64.
_FIRST_USER, USERS, _PROCESSES = 1_500_000_000, 64, 1 << 22
_PLACES = {"HOME": "/tmp", "TMPDIR": "/tmp", "USER": "sandbox", "LOGNAME": "sandbox"}
_NUMBERS = itertools.count()
# Seconds for which a folder's listing is cached. Running workers see later files anyway.
_FRESH = 60.0
# The system's configuration files that programs read.
_SETTINGS = (
    "/etc/alternatives",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/etc/mime.types",
    "/etc/fonts",
    "/sys/devices/system/cpu",
)


def users_here(process: Path = Path("/proc/self")) -> tuple[int, int]:
    """Return (first, count): the ids for sandboxes in the user namespace of `process`; (0, 0) if it has none to spare."""
    end = min(_end_of(process / name) for name in ("uid_map", "gid_map"))
    if end >= _FIRST_USER + USERS * _PROCESSES:
        return _FIRST_USER, USERS * _PROCESSES
    return (end - 4096, 4000) if end >= 8192 else (0, 0)


def _end_of(table: Path) -> int:
    """Return one more than the highest id in a uid_map or gid_map, whose lines are (first inside, first outside, count)."""
    try:
        return max(sum(map(int, line.split()[::2])) for line in table.read_text().splitlines())
    except (OSError, ValueError):
        return 0


def user_of(process: int, slot: int) -> int:
    """Return the user id of sandbox number `slot` of the psigrad process with the id `process`.

    Sandboxes that run at the same time have different users, because the kernel counts processes by user.
    """
    first, count = users_here()
    return first + (process % _PROCESSES * USERS + slot % USERS) % max(1, count)


def command(
    tier: TierName,
    user: int = _FIRST_USER,
    *,
    shown: Sequence[str] = (),
    folder: str = "/tmp",
    variables: Mapping[str, str] | None = None,
    files: Sequence[tuple[int, str]] = (),
    rules: int | None = None,
    info: int | None = None,
    files_mb: int = 16,
) -> list[str]:
    """Return the bwrap part of the command line. In the tier "root", it ends with the change to the user id `user`.

    `shown` are files and folders that are visible at their own paths, read-only, and `folder` is the working folder. `variables`
    replace the environment. Each of `files` is (file descriptor of its content, its path inside). `rules` is the file descriptor
    of the seccomp filter. bwrap writes the id of the first process to `info`. Each temporary folder holds `files_mb` MiB.
    """
    space = ["--size", str(files_mb << 20), "--perms", "1777", "--tmpfs"]
    own = ["--unshare-user", "--disable-userns", "--uid", "1000", "--gid", "1000"] if tier == "user" else []
    own += [f"--unshare-{name}" for name in ("ipc", "pid", "net", "uts", "cgroup-try")]
    seen = sorted({os.path.realpath(sys.base_prefix), *shown})  # a folder comes before its content
    line = [
        *("bwrap", *own, "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--ro-bind", "/usr", "/usr"),
        *(part for name in ("lib", "lib64", "bin", "sbin") for part in _like_the_root(name)),
        *(part for path in _SETTINGS for part in ("--ro-bind-try", path, path)),
        # writing here would change the whole machine's kernel: in the root's namespace nothing else protects it
        *("--proc", "/proc", "--ro-bind", "/proc/sys", "/proc/sys", "--dev", "/dev"),
        *(*space, "/tmp", *space, "/dev/shm", *space, "/run", "--remount-ro", "/dev"),
        *(part for path in seen if not path.startswith("/usr/") for part in _in_its_place(path)),
        *(part for path in _special_files(shown) for part in ("--ro-bind", "/dev/null", path)),
        *(part for number, place in files for part in ("--perms", "0444", "--ro-bind-data", str(number), place)),
        *("--hostname", "sandbox", "--chdir", folder, *(() if variables is None else ("--clearenv",))),
        *(part for name, value in {**(variables or {}), **_PLACES}.items() for part in ("--setenv", name, value)),
    ]
    if rules is not None:
        line += ["--seccomp", str(rules)]
    if info is not None:
        line += ["--info-fd", str(info)]
    if tier == "root":
        line += [part for name in ("SETUID", "SETGID", "SETPCAP") for part in ("--cap-add", f"CAP_{name}")]
    line += ["--remount-ro", "/", "--"]
    if tier == "root":
        line += ["setpriv", "--reuid", str(user), "--regid", str(user), "--clear-groups", "--no-new-privs"]
        line += ["--bounding-set=-all", "--inh-caps=-all"]
    return line


def _like_the_root(name: str) -> list[str]:
    """Return bwrap's options that show /`name`, such as /bin, as on this machine: as a link into /usr, or as a folder."""
    path = Path("/", name)
    if path.is_symlink():
        return ["--symlink", os.readlink(path), str(path)]
    return ["--ro-bind", str(path), str(path)] if path.is_dir() else []


def _in_its_place(path: str) -> Iterator[str]:
    """Yield bwrap's options that show a file or folder at its own path, even if only its owner may enter the parent folders."""
    for above in reversed(Path(path).parents[:-1]):
        yield from ("--perms", "0755", "--dir", str(above))
    yield from ("--ro-bind", path, path)


def special_files(folders: Sequence[str]) -> Iterator[str]:
    """Yield the sockets, FIFOs and devices in these folders, since a read-only mount still allows writing to them.

    Python's own folders are skipped.
    """
    own = (f"{sys.prefix}/", f"{sys.base_prefix}/")
    left = [folder for folder in folders if os.path.isdir(folder) and not f"{folder}/".startswith(own)]
    while left:
        try:
            entries = list(os.scandir(left.pop()))
        except OSError:
            continue  # the process inside has no more rights, so it cannot see the folder either
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                left += [entry.path] if entry.path != sys.prefix else []
            elif not (entry.is_symlink() or entry.is_file(follow_symlinks=False)):
                yield entry.path


def _special_files(folders: Sequence[str]) -> Iterator[str]:
    """Yield `special_files`, cached for a minute, since a working folder may have a million files and workers start often."""
    yield from filter(os.path.lexists, _find_in(tuple(folders), int(time.monotonic() / _FRESH)))


@functools.lru_cache(maxsize=8)
def _find_in(folders: tuple[str, ...], minute: int) -> tuple[str, ...]:
    return tuple(special_files(folders))


def memory_file(content: bytes) -> int:
    """Return the file descriptor of an anonymous file in memory with this content, positioned at its start."""
    descriptor = os.memfd_create("psigrad")
    os.write(descriptor, content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


@dataclass(frozen=True)
class Enclosure:
    """The settings of a worker's sandbox. The worker, a psigrad process with a user's code, sees only Python and `shown`."""

    tier: TierName
    shown: tuple[str, ...] = ()
    """Files and folders of the machine that the worker can read, besides Python's."""
    files_mb: int = 1024
    processes: int = 1024
    sockets: bool = False
    """True if the worker may open sockets. Even then it can reach only itself and the servers of Unix sockets in `shown`."""

    @classmethod
    def of_worker(cls, tier: TierName, files: Sequence[str] = (), *, sockets: bool = False) -> Enclosure:
        """Return an enclosure that shows a worker its import and working folders and `files`. With `sockets`, sockets work."""
        own = [os.getcwd(), sys.prefix, sys.base_prefix, *(os.path.abspath(path) for path in (*sys.path, *files))]
        shown = tuple(dict.fromkeys(path for path in own if path != "/" and os.path.exists(path)))
        return cls(tier, shown, sockets=sockets)

    def line(self) -> tuple[list[str], list[int]]:
        """Return (the prefix of the worker's command line, the file descriptors that it inherits).

        The caller closes these file descriptors once the worker runs.
        """
        found = seccomp.program(self.sockets)
        given = [] if found is None else [memory_file(found)]
        user = user_of(os.getpid(), next(_NUMBERS))
        folder = os.getcwd() if os.getcwd() in self.shown else "/tmp"
        rules = given[0] if given else None
        line = command(self.tier, user, shown=self.shown, folder=folder, rules=rules, files_mb=self.files_mb)
        # after the change of user, because processes are counted by user
        return [*line, "prlimit", f"--nproc={self.processes}", "--core=0", "--"], given
