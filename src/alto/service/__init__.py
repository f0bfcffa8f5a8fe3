"""LoRA tuning as a service: OpenAI's fine-tuning API with search inside, an API and a dashboard of its own."""
