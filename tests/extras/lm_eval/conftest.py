"""lm-eval is no dependency of psigrad. `make test-lm-eval` installs it; where it is not, its tests cannot even be imported."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore = [] if find_spec("lm_eval") else ["test_harness.py"]
