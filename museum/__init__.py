"""The museum of silent bugs: public faults that raise no error, each with the right value worked out by hand.

    python -m museum                            list the exhibits
    python -m museum --exhibit accumulated-tokens   explain one
    python -m museum --library trl              compute every value with a library, and print what holds today

An exhibit is an input of a few numbers, the right value with its derivation, and the value that the faulty formula gives. An
adapter computes the value with the public code of one library. Only `adapters/psigrad.py` imports psigrad.
"""

from __future__ import annotations
