"""The kernels of a training step on a GPU that is not here, computed."""
