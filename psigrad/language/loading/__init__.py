"""Models of a run: where they come from (a folder, the hub, a GGUF file, an adapter, an object in memory), loaded and ready."""
