"""Configurations of LLaMA-Factory, Axolotl and TRL, read as tasks and written for jobs; none of the tools is needed."""

from alto.importing.axolotl_data import NAMED_TYPES
from alto.importing.draft import NoteKind
from alto.importing.imported import TOOLS, ImportedFile, ImportedTask, import_file, imported_task
from alto.importing.keys import ExportedJob, Rows
from alto.importing.sources import check_dataset

__all__ = [
    "NAMED_TYPES",
    "TOOLS",
    "ExportedJob",
    "ImportedFile",
    "ImportedTask",
    "NoteKind",
    "Rows",
    "check_dataset",
    "import_file",
    "imported_task",
]
