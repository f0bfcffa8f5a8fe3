"""The adapter to be exported, with facts about its training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # it is in its __init__

from alto.backbone import SHIPPED_MODELS, resolve_model
from alto.errors import HubError, SpecError
from alto.importing import Rows
from alto.lora import HEAD, SavedAdapter
from alto.records import LabelSet
from alto.spec import BaseModelSpec, JobConfig, Task


def repository_fault(name: str) -> str:
    """Return the reason why ``name`` is not a valid repository name; empty if it is valid."""
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        return str(error)
    return ""


def check_pushable(repository: str) -> None:
    """Check, before anything is written, that ``repository`` can be pushed to."""
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
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in (401, 403):
            raise HubError(
                f"push_to_hub: the Hugging Face Hub rejected the token: {error}; log in with a token that has write "
                "permission: hf auth login"
            ) from error
        raise HubError(
            f"push_to_hub: the Hugging Face Hub could not check the token: {error}; check the connection, then retry"
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
            f"push_to_hub: uploading {folder} to {repository} failed: {error}; the exported folder is complete; retry "
            f"with: hf upload {repository} {folder}"
        ) from error
    return str(url)


@dataclass(frozen=True, slots=True, kw_only=True)
class Winner:
    """An adapter from a run or from a folder.

    Attributes:
        name: Name of the task or of the folder; safe as a file name.
        base: Its base model, with the chat template that the adapter was trained with.
        is_base_named: Whether the caller named the base model.
        named_labels: Labels of its classification head, if it has a head and they are known.
        task: The task of its run; None for an adapter from a folder.
        rows: Layout of the task's rows; None if it is not needed.
        data: ``form`` and ``of_messages`` of its rows, as in a run's journal; empty if unknown.
    """

    name: str
    adapter: SavedAdapter
    base: BaseModelSpec
    is_base_named: bool = False
    named_labels: LabelSet | None = None
    task: Task | None = None
    config: JobConfig | None = None
    rows: Rows | None = None
    data: Mapping[str, Any] = field(default_factory=dict)

    @property
    def base_model(self) -> str:
        """The base model that exported files name: the model in the adapter's config, or the one the caller named."""
        return resolve_model(self.base.id if self.is_base_named else self.adapter.base_model or self.base.id)

    @property
    def labels(self) -> LabelSet | None:
        """Labels of the classification head; None without a head. If their names are unknown, these are transformers'
        default names."""
        if self.named_labels is not None or not self.adapter.has_head:
            return self.named_labels
        names = tuple(f"LABEL_{index}" for index in range(len(self.adapter.weights.extras[HEAD])))
        return LabelSet(problem_type="single_label_classification", names=names)


def is_hub_id(model: str) -> bool:
    """Return whether ``model`` may be a model on the hub: neither one of ALTO's own models nor a local path."""
    if model in SHIPPED_MODELS or Path(model).expanduser().exists():
        return False
    return not repository_fault(model)
