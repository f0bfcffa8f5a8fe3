"""Configurations of LLaMA-Factory, Axolotl and TRL as tasks. Without torch, and without these tools."""

from alto.importing.draft import Note, NoteKind
from alto.importing.imported import ImportedFile, ImportedTask, import_file, imported_task
from alto.importing.tools import TOOLS

__all__ = ["TOOLS", "ImportedFile", "ImportedTask", "Note", "NoteKind", "import_file", "imported_task"]
