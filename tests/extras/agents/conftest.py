"""The programs are no dependencies of psigrad. `make test-agents` installs them; where they are not, nothing is collected."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
collect_ignore = [] if find_spec("minisweagent") else ["test_programs.py"]
