"""tinker is no dependency of psigrad. `make test-tinker` installs it; where it is not, its tests cannot even be imported."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore = [] if find_spec("tinker") else ["test_tinker_client.py", "test_cookbook.py"]
