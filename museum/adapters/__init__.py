"""The adapters: a module for each library, in which a function with an exhibit's name computes its values."""

from __future__ import annotations
