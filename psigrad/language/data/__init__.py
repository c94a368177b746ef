"""Datasets: forms of rows, files and other sources, chat templates, training items, and procedural tasks."""
