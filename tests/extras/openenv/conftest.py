"""OpenEnv is no dependency of psigrad. `make test-openenv` installs it; where it is not, its tests cannot even be imported."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore = [] if find_spec("openenv") else ["test_openenv.py"]
