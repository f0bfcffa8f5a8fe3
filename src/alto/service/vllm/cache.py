"""The folder in which vLLM's filesystem resolver looks for adapters, by the names of models.

A vLLM server that is started with ``VLLM_PLUGINS=lora_filesystem_resolver`` and ``VLLM_LORA_RESOLVER_CACHE_DIR`` loads
an adapter from this folder when a request names it. So it serves all models again after a restart, without the service.
Source: code of vLLM's ``plugins/lora_resolvers/filesystem_resolver.py``.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

from alto.base import read_json, replace_file
from alto.errors import ServiceError

CONFIG_FILE = "adapter_config.json"
_BASE = "base_model_name_or_path"
_UNFINISHED = ".unfinished-"


class AdapterCache:
    """A folder with a folder for every model, and a symbolic link for every alias.

    Args:
        folder: Created if absent. Copies that an earlier process has not finished are deleted.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()

    def publish(self, name: str, source: Path, base_model: str) -> None:
        """Copy the adapter in ``source``, completely or not at all, and write ``base_model`` into its configuration. If
        the adapter is there already, only its configuration is updated.

        Args:
            base_model: Path or hub id with which the vLLM server was started, as it lists it (``root`` in
                ``/v1/models``).

        Raises:
            OSError: The folder cannot be written.
        """
        place = self._place(name)
        if place.is_dir():
            self._rename_base(place, base_model)
            return
        fresh = self._unfinished()
        shutil.copytree(source, fresh)
        self._rename_base(fresh, base_model)
        place.parent.mkdir(parents=True, exist_ok=True)
        fresh.rename(place)

    def point(self, aliases: Mapping[str, str]) -> list[str]:
        """Create, change and delete links so that there is one for each of ``aliases``, to the folder of its model. A
        link changes in one step.

        Returns:
            Aliases whose link is new, changed or gone; vLLM must look for them again.
        """
        present = {str(link.relative_to(self._folder)): link for link in self._links()}
        changed = []
        for alias, name in aliases.items():
            place, target = self._place(alias), self._place(name)
            if alias in present and place.resolve() == target.resolve():
                continue
            fresh = self._unfinished()
            place.parent.mkdir(parents=True, exist_ok=True)
            fresh.symlink_to(os.path.relpath(target, place.parent), target_is_directory=True)
            fresh.replace(place)
            changed.append(alias)
        for alias in present.keys() - aliases.keys():
            present[alias].unlink(missing_ok=True)
            changed.append(alias)
        return changed

    def remove(self, name: str) -> None:
        """Delete the adapter of a model; no error if absent."""
        shutil.rmtree(self._place(name), ignore_errors=True)

    def _place(self, name: str) -> Path:
        place = self._folder / name
        if ".." in place.parts or place == self._folder:
            raise ServiceError(f"expected the name of a model, found {name!r}, which is not the name of a folder")
        return place

    def _unfinished(self) -> Path:
        return self._folder / f"{_UNFINISHED}{uuid.uuid4().hex}"

    def _links(self) -> Iterator[Path]:
        for folder, names, files in os.walk(self._folder):
            yield from (path for name in (*names, *files) if (path := Path(folder) / name).is_symlink())

    @staticmethod
    def _rename_base(folder: Path, base_model: str) -> None:
        config = read_json(folder / CONFIG_FILE)
        if config.get(_BASE) != base_model:
            replace_file(folder / CONFIG_FILE, json.dumps(config | {_BASE: base_model}, indent=2) + "\n")
