"""Preference tuning: forty configurations of DPO, compared with TRL."""
