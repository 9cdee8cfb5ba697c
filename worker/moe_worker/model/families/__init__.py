"""A file per family of models: its config.json as a `ModelSpec`, its tensors by role."""
