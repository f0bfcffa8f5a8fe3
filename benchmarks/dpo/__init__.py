"""Preference tuning: forty configurations of DPO, beside TRL."""
