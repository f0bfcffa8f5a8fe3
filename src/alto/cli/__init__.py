"""The command line: reads arguments and files, shows progress, reports an error in one message.

Each module holds the commands of one subject. Only commands that train import torch, not those that read.
"""

from alto.cli.app import app, main

__all__ = ["app", "main"]
