"""Optional features outside the core: interfaces to other programs, and features that few users need.

`psigrad/extras.py` lists each of them by name, and psigrad imports it on first use. The core can be read, tested and run without
this package.
"""
