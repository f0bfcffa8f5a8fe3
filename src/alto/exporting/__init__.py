"""Export of finished adapters: for vLLM, as merged weights, as GGUF, as other trainers' configurations, to the hub."""

from alto.exporting.export import ExportSettings, check_before, write_export
from alto.exporting.tool_data import Rows
from alto.exporting.winner import Winner

__all__ = ["ExportSettings", "Rows", "Winner", "check_before", "write_export"]
