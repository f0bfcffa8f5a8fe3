"""Uploaded files: where they are kept, and what is checked before they are."""

from alto.service.files.artefacts import Artefacts
from alto.service.files.checks import Checked, check_rows, sha256_of

__all__ = ["Artefacts", "Checked", "check_rows", "sha256_of"]
