"""Uploads an exported folder to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # it is in its __init__

from alto.errors import HubError, SpecError

__all__ = ["check_pushable", "push", "repository_fault"]


def repository_fault(name: str) -> str:
    """Return the reason why ``name`` is not a valid repository name; empty if it is valid."""
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        return str(error)
    return ""


def check_pushable(repository: str) -> None:
    """Check, before anything is written, that ``repository`` can be pushed to.

    Raises:
        SpecError: It is not a valid repository name.
        HubError: There is no token, or the hub does not accept it.
    """
    fault = repository_fault(repository)
    if fault:
        raise SpecError(
            f"push_to_hub: expected a repository such as name or owner/name, found {repository!r} ({fault})"
        )
    if get_token() is None:
        raise HubError(
            "push_to_hub: expected a token of the Hugging Face hub, found none; log in with: hf auth login, or set "
            "HF_TOKEN"
        )
    try:
        HfApi().whoami()
    except Exception as error:  # errors of the hub, of its HTTP client, or of the system
        raise HubError(
            f"push_to_hub: expected a hub that accepts the token, found: {error}; log in with a token that may write: "
            "hf auth login"
        ) from error


def push(folder: Path, repository: str) -> str:
    """Upload the files of ``folder`` to ``repository``, which is created as a private repository if it does not exist.

    Returns:
        The repository's URL.

    Raises:
        HubError: The hub rejects the upload, or cannot be reached; the folder is kept.
    """
    api = HfApi()
    try:
        url = api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(repo_id=url.repo_id, folder_path=folder, commit_message="Export by ALTO")
    except Exception as error:
        raise HubError(
            f"push_to_hub: expected to upload {folder} to {repository}, found: {error}; the folder is complete: upload "
            f"it later with: hf upload {repository} {folder}"
        ) from error
    return str(url)
