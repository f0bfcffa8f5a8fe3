"""The ways to train adapters on several ranks, the gate between them, and the model on paper."""
