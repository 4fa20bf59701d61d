"""Find a model, prepare it once, describe what was prepared."""
