"""Sweeps on a real pretrained model, compared with the tools that people use today."""
