"""Folders made of trained adapters: the best adapter, adapters for vLLM, merged weights, GGUF, trainers' settings."""

from alto.artifacts.adapter import export_best, is_outdated
from alto.artifacts.card import ModelUse
from alto.artifacts.export import ExportSettings, check_before, write_export
from alto.artifacts.winner import Winner
from alto.importing import Rows

__all__ = [
    "ExportSettings",
    "ModelUse",
    "Rows",
    "Winner",
    "check_before",
    "export_best",
    "is_outdated",
    "write_export",
]
