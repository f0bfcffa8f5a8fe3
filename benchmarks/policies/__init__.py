"""Early-exit policies by replay: peers' policies, and what a policy saves and loses on a recording."""
