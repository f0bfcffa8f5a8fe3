"""Memory and time of tasks, predicted and measured, each measurement in a process of its own."""
