"""LoRA tuning as a service: OpenAI's fine-tuning API extended with search, ALTO's own API, and a dashboard."""
