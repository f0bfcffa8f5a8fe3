"""What ``benchmarks/kernels.py`` is made of: workloads, variants of a training step, the gate, the measurements."""
