"""`python -m psigrad`."""

from __future__ import annotations

import sys

from psigrad.cli import main

sys.exit(main())
