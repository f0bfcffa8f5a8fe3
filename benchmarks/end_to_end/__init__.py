"""The main benchmark: a sweep of LoRA configurations on one base model, done in all common ways."""
