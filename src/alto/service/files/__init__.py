"""Uploaded files: their storage, and the checks before they are stored."""

from alto.service.files.artefacts import Artefacts, chunks_of
from alto.service.files.checks import Checked, check_rows, sha256_of

__all__ = ["Artefacts", "Checked", "check_rows", "chunks_of", "sha256_of"]
