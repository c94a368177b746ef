"""xllamacpp, which is llama.cpp as a wheel, is no dependency of psigrad. `make test-llama-cpp` installs it."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore = [] if find_spec("xllamacpp") else ["test_llama_cpp.py"]
