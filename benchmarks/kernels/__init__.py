"""One training step of many adapters: workloads, variants, the gate, the measurements, and the step as a model."""
