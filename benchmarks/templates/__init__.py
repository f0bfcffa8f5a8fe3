"""Conversations, chat templates and TRL's preprocessing, for ``benchmarks/templates.py``."""
