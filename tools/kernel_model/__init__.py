"""A computed model of the kernels of a training step on a GPU."""
