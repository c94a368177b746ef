"""Post-training of language models: models, data, sampling, rewards, training, and whole runs."""

from __future__ import annotations

from psigrad import extras

extras.check_versions()  # before a module of an older package fails to import
