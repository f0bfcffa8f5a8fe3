"""ALTO's own API: what OpenAI's has no word for. A fine-tuning job is a task here, and its configurations are jobs."""
