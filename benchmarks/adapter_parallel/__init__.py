"""The ways to train adapters on several ranks, the gate that compares them, and a computed model of larger clusters."""
