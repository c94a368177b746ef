"""Dataset forms, chat templates, sources, batches and procedural tasks."""
