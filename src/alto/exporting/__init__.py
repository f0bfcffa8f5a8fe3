"""Finished adapters for other programs: vLLM, merged weights, GGUF, configurations of other trainers, the hub."""

from alto.exporting.export import ExportSettings, check_before, write_export
from alto.exporting.tool_data import Rows
from alto.exporting.winner import Winner

__all__ = ["ExportSettings", "Rows", "Winner", "check_before", "write_export"]
