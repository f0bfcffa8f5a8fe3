"""Which model classes of transformers ALTO trains exactly."""
