"""Memory and time of tasks, predicted and measured; each measurement is in a process of its own."""
