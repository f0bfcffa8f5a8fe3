"""Parts of ``policies.py``: peers' policies, and what a policy saves and loses on a recording."""
