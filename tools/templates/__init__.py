"""Which tokens are trained under chat templates, beside TRL."""
