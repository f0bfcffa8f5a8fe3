"""Uploads an exported folder to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # it is in its __init__

from alto.errors import HubError, SpecError

__all__ = ["check_pushable", "push", "repository_fault"]


def repository_fault(name: str) -> str:
    """Why ``name`` cannot be a repository of the hub; empty where it can."""
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        return str(error)
    return ""


def check_pushable(repository: str) -> None:
    """Check, before anything is written, that ``repository`` can be pushed to.

    Raises:
        SpecError: It is no name of a repository.
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
    except Exception as error:  # the hub's, those of its HTTP client, and the system's
        raise HubError(
            f"push_to_hub: expected a hub that accepts the token, found: {error}; log in with a token that may write: "
            "hf auth login"
        ) from error


def push(folder: Path, repository: str) -> str:
    """Upload the files of ``folder`` to ``repository``, which is made, and private, where there is none.

    Returns:
        Its address.

    Raises:
        HubError: The hub refuses, or cannot be reached; the folder stays.
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
