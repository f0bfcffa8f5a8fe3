"""Uploaded files: their storage, and the checks before they are stored."""

from alto.service.files.artefacts import Artefacts, chunks_of
from alto.service.files.checks import check_rows, sha256_of

__all__ = ["Artefacts", "check_rows", "chunks_of", "sha256_of"]
