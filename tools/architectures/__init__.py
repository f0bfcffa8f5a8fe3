"""Checks which model classes of transformers ALTO trains exactly."""
