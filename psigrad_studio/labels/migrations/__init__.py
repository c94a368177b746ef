"""The history of the tables: one file per change, applied in order by `migrate.upgrade` when a store is opened.

A released file is never edited; a change of `schema` comes with a new one (`tests/studio/labels/test_migrate.py` compares both).
"""
