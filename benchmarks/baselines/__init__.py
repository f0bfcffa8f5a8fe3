"""The baselines and peers with which ALTO is compared: the tools that people use today."""
