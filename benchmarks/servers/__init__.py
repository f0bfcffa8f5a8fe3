"""Exports loaded by the servers that people use, and compared with PEFT."""
