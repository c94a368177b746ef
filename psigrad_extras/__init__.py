"""Optional features outside the core: interfaces to other programs, and capabilities that few users need.

psigrad finds each of them by a name in `psigrad/extras.py` and imports it on first use. The core can be read, tested and run
without this package.
"""
