"""ALTO's own API, for what OpenAI's API lacks. A fine-tuning job is a task here; its configurations are jobs."""
