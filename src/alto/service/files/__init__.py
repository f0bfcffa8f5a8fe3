"""Uploaded files: where they are kept, and what is checked before they are."""

from alto.service.files.artefacts import Artefacts, chunks_of
from alto.service.files.checks import Checked, check_rows, sha256_of

__all__ = ["Artefacts", "Checked", "check_rows", "chunks_of", "sha256_of"]
