"""The history of the tables: one file per change, applied in order by `migrate.upgrade` when a store is opened.

No version was released yet, so that the first file makes what `schema` declares. From the first release on it names its own
tables, a released file is never edited, and a change of `schema` comes with a new one.
"""
