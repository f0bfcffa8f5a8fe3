"""Sweeps on a real pretrained model, beside what people use today."""
