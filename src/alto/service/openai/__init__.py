"""OpenAI's API for files, fine-tuning jobs and models, as its clients send and read it."""
