"""Import of LLaMA-Factory, Axolotl and TRL configurations as tasks; neither torch nor these tools are needed."""

from alto.importing.draft import Note, NoteKind
from alto.importing.imported import TOOLS, ImportedFile, ImportedTask, import_file, imported_task

__all__ = ["TOOLS", "ImportedFile", "ImportedTask", "Note", "NoteKind", "import_file", "imported_task"]
