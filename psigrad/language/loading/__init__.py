"""The models of a run, loaded from a folder, the hub, a GGUF file, an adapter, or an object in memory."""
