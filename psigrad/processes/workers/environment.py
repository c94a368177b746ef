"""Which environment variables a worker gets: what programs need to find their files, and no secrets."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable

_USUAL = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|TZ|LANG|LANGUAGE|PWD|TMPDIR|TMP|TEMP|(LD|DYLD)_LIBRARY_PATH|VIRTUAL_ENV|CC|CXX"
    # a worker is none of the ranks that torchrun started
    r"|(LC|PYTHON|CONDA|XDG|OMP|MKL|OPENBLAS|CUDA|NVIDIA|HF|TRANSFORMERS|TORCH(?!ELASTIC)|TOKENIZERS|PSIGRAD)_?\w*"
    r"|(SSL_CERT|REQUESTS)_?\w*"
    r"|(https?|no|all)_proxy",
    re.IGNORECASE,
)
_SECRET = re.compile(r"token|secret|passw|credential|(^|_)(api_?)?key(_|$)|auth", re.IGNORECASE)


def passed_on(extra: Iterable[str] = ()) -> dict[str, str]:
    """The variables of this process that a worker gets: the usual ones, and those named in `extra`."""
    names = set(extra)
    kept = {k: v for k, v in os.environ.items() if k in names or (_USUAL.fullmatch(k) and not _SECRET.search(k))}
    path = os.pathsep.join(p or os.getcwd() for p in sys.path)
    return {**kept, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": path}


def withheld(extra: Iterable[str] = ()) -> list[str]:
    """The names of the variables that a worker does not get."""
    return sorted(os.environ.keys() - passed_on(extra).keys())
