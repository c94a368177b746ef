"""Two machines on this one: networks with a cable between them that can be cut. Needs root, if only of a user namespace."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE, THERE, PORT = "10.77.0.1", "10.77.0.2", 6399
# A lost machine is noticed sooner than after half a minute, and not where one is only slow.
QUICK = {"RAY_health_check_period_ms": "2000", "RAY_health_check_timeout_ms": "5000", "RAY_health_check_failure_threshold": "3"}
RAY = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1", "--object-store-memory=100000000"]


def ip(*arguments: str, inside: int = 0) -> None:
    """`ip …`, here or in the network of a process."""
    where = ["nsenter", f"--target={inside}", "--net"] if inside else []
    subprocess.run([*where, "ip", *arguments], check=True)


class Machines:
    """A Ray cluster whose head is here; `join()` adds the other machine, `cut()` and `mend()` are the cable's. Ray is started
    again on a machine where it has ended, as it does when it was given up, or where the start took longer than it waits.
    """

    address = f"{HERE}:{PORT}"

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        # no token, which an earlier cluster of this machine may have left
        self.folder, self.environment = folder, {**os.environ, "RAY_AUTH_MODE": "disabled", **environment, **QUICK}
        # short, since sockets lie in it; and of its own, so that "auto" does not look for this cluster later
        self.place = tempfile.mkdtemp(prefix="ray-")
        # the other network lives as long as this process
        self.other = subprocess.Popen(["unshare", "--net", "sleep", "100000"])
        self.nodes: list[subprocess.Popen] = []
        time.sleep(0.5)
        ip("link", "add", "here", "type", "veth", "peer", "name", "there")
        ip("link", "set", "there", "netns", str(self.other.pid))
        ip("addr", "add", f"{HERE}/24", "dev", "here")
        ip("link", "set", "here", "up")
        ip("link", "set", "lo", "up", inside=self.other.pid)
        ip("addr", "add", f"{THERE}/24", "dev", "there", inside=self.other.pid)
        ip("link", "set", "there", "up", inside=self.other.pid)
        self._start(
            [
                *RAY,
                "--head",
                f"--port={PORT}",
                f"--node-ip-address={HERE}",
                "--include-dashboard=false",
                f"--temp-dir={self.place}",
            ]
        )
        self._until_it_answers()

    def _until_it_answers(self) -> None:
        end = time.monotonic() + 240
        while "Ray runtime started" not in (said := (self.folder / "node-0.log").read_text()):
            assert time.monotonic() < end, said[-3000:]
            time.sleep(0.5)

    def join(self) -> None:
        """Ray on the other machine."""
        inside = ["nsenter", f"--target={self.other.pid}", "--net"]
        self._start([*inside, *RAY, f"--address={self.address}", f"--node-ip-address={THERE}"])

    def _start(self, command: list[str]) -> None:
        log = (self.folder / f"node-{len(self.nodes)}.log").open("wb")
        again = ["sh", "-c", 'while :; do "$@"; sleep 1; done', "sh", *command]
        self.nodes.append(subprocess.Popen(again, env=self.environment, stdout=log, stderr=log, start_new_session=True))

    def cut(self) -> None:
        """Nothing passes any more, in either direction."""
        ip("link", "set", "here", "down")

    def mend(self) -> None:
        """The cable is whole again."""
        ip("link", "set", "here", "up")

    def close(self) -> None:
        """End all of it."""
        for node in self.nodes:
            os.killpg(node.pid, signal.SIGKILL)
            node.wait()
        self.other.kill()
        self.other.wait()
        shutil.rmtree(self.place, ignore_errors=True)
