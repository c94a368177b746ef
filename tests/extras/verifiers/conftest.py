"""verifiers is no dependency of psigrad. `make test-verifiers` installs it, with uv, which its harnesses start with."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

TASKSETS = str(Path(__file__).parent / "tasksets")
collect_ignore_glob = ["tasksets/*"] if find_spec("verifiers") else ["*.py"]
if find_spec("verifiers"):
    sys.path.append(TASKSETS)  # where verifiers looks for a taskset of that name, in its servers' processes too
    os.environ["PYTHONPATH"] = os.pathsep.join([TASKSETS, *filter(None, [os.environ.get("PYTHONPATH")])])
