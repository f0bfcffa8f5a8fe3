"""Settings of a service: a YAML file, and options of ``alto serve``."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from alto.errors import SpecError
from alto.spec import SpecModel, canonical_keys, parse_reward_funcs, read_mapping

MIB = 2**20
MOST_NAME_CHARS = 96
"""Maximum length of a base model's name, as on the Hugging Face hub; the name of a fine-tuned model then fits its
column."""

_SERVER_URL = r"^https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?(/[A-Za-z0-9._~/-]*)?$"


class VllmSettings(SpecModel):
    """A vLLM server that serves the adapters. It must be started with ``--enable-lora`` and
    ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=true``, and see the service's folder at the same path.

    Attributes:
        url: Its address, such as ``http://127.0.0.1:8000``.
        api_key: Its bearer key; None sends no key.
        base_model: Name under which it serves the base model. An adapter is registered if this is the key or the value
            of its base model in ``models``, or if ``models`` has a single entry and ``hub_models`` is false.
        probe_interval_s: Seconds between two checks that it still has the adapters.
        timeout_s: Longest wait for an answer, or for the next piece of a streamed answer.
        cache: Folder of vLLM's filesystem resolver, written by the service; None registers adapters by requests. See
            :class:`alto.service.vllm.cache.AdapterCache`.
    """

    url: str = Field(pattern=_SERVER_URL, description="address of the server")
    api_key: str | None = Field(default=None, pattern=r"^[!-~]+$", description="bearer key of the server")
    base_model: str = Field(min_length=1, description="name of the base model on the server")
    probe_interval_s: float = Field(default=10.0, gt=0, le=3600, description="seconds between two probes")
    timeout_s: float = Field(default=300.0, gt=0, le=3600, description="longest wait for an answer, in seconds")
    cache: str | None = Field(default=None, min_length=1, description="folder of vLLM's filesystem resolver")


class ServiceSettings(SpecModel):
    """Settings of a service.

    Attributes:
        host, port: Address to listen on. If other machines can reach it, keys are required.
        data_dir: Folder for runs, files, and the default database. All servers that share a database, and all nodes of
            a cluster, must see it at the same path.
        database: SQLAlchemy address; None uses an SQLite file in ``data_dir``.
        artefacts: Storage of uploaded files and adapters, a path or any fsspec URL; None uses ``data_dir``.
        cluster, total_gpus, strategy: See :class:`alto.Engine`.
        machines: Numbers of GPUs of the cluster's machines when all of them are there. Tasks that fit on them or on the
            present machines are accepted. None: the largest machines that the cluster has had.
        models: Base models by the names that requests use: shipped names, hub ids or local folders.
        hub_models: Whether requests may also name any model of the Hugging Face hub.
        trust_remote_code: Names of models whose own Python code may run.
        graders: Scorers that requests may name as the ``type`` of a grader, each with its settings as in
            ``reward_funcs``. They may call a Python function, contact a server or search for a pattern, because the
            owner of the service wrote them.
        max_gpus, max_tasks, max_bytes, requests_per_s: Limits of tenants that have no limits of their own. Bytes count
            uploaded files and run folders.
        vllm: The vLLM server that serves the adapters; None if there is none.
        hub_push: Whether tenants may upload their adapters to the Hugging Face hub, with the token of the service, to
            any repository that this token can write.
    """

    host: str = Field(default="127.0.0.1", min_length=1, description="address to listen on")
    port: int = Field(default=8100, ge=0, le=65535, description="port to listen on")
    data_dir: str = Field(default="alto-service", min_length=1, description="folder of runs, files and the database")
    database: str | None = Field(default=None, min_length=1, description="address of the database")
    artefacts: str | None = Field(default=None, min_length=1, description="where files and adapters are kept")
    cluster: str = Field(default="local", min_length=1, description="machines that tasks run on")
    total_gpus: int | None = Field(default=None, ge=1, description="maximum number of GPUs to use")
    strategy: str = Field(default="adapter_parallel", description="how a task uses several GPUs")
    machines: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(
        default=None, description="numbers of GPUs of the cluster's machines"
    )
    models: Mapping[str, str] = Field(default={"alto-tiny": "alto-tiny"}, description="base models by name")
    hub_models: bool = Field(default=False, description="whether requests may name any model of the hub")
    trust_remote_code: tuple[str, ...] = Field(default=(), description="models whose own code may run")
    graders: Mapping[str, Any] = Field(default={}, description="graders of the service, by the names in requests")
    max_upload_bytes: int = Field(default=512 * MIB, ge=1, description="maximum size of an uploaded file, in bytes")
    max_request_bytes: int = Field(default=MIB, ge=1024, description="maximum size of any other request, in bytes")
    max_jobs: int = Field(default=1000, ge=1, le=10_000, description="maximum number of jobs of one task")
    max_gpus: int | None = Field(default=None, ge=1, description="maximum number of GPUs that a tenant uses at a time")
    max_tasks: int | None = Field(default=None, ge=1, description="maximum number of open tasks of a tenant")
    max_bytes: int | None = Field(default=None, ge=1, description="maximum size of a tenant's files and runs, in bytes")
    requests_per_s: float | None = Field(
        default=None, gt=0, description="maximum number of requests of a tenant per second"
    )
    vllm: VllmSettings | None = Field(default=None, description="vLLM server that serves the adapters")
    hub_push: bool = Field(default=False, description="whether adapters may be uploaded to the hub")
    json_logs: bool = Field(default=False, description="whether log lines are JSON")

    def __init__(self, /, **values: Any) -> None:
        given = canonical_keys(values, fields=type(self).model_fields, aliases={}, where="the settings file")
        if isinstance(given.get("vllm"), Mapping):
            given["vllm"] = canonical_keys(given["vllm"], fields=VllmSettings.model_fields, aliases={}, where="vllm")
        super().__init__(**given)

    @field_validator("trust_remote_code", "machines", mode="before")
    @classmethod
    def _accept_list(cls, value: object) -> object:
        return tuple(value) if isinstance(value, list) else value

    @field_validator("models")
    @classmethod
    def _check_names(cls, value: Mapping[str, str]) -> Mapping[str, str]:
        for name in value:
            if not 0 < len(name) <= MOST_NAME_CHARS:
                raise ValueError(
                    f"should have names of 1 to {MOST_NAME_CHARS} characters, found {name[:120]!r}. Choose another "
                    "name."
                )
        return value

    @field_validator("graders")
    @classmethod
    def _check_graders(cls, value: Mapping[str, Any]) -> Mapping[str, Any]:
        return {name: parse_reward_funcs([scoring])[0].to_dict() for name, scoring in value.items()}

    @field_validator("vllm", mode="before")
    @classmethod
    def _accept_mapping(cls, value: object) -> object:
        return VllmSettings(**value) if isinstance(value, Mapping) else value

    @model_validator(mode="after")
    def _check_machines(self) -> ServiceSettings:
        if self.machines is not None and self.cluster == "local":
            raise ValueError(
                "machines should be given with a cluster of several machines, found cluster: local, which is this "
                "machine. Remove it."
            )
        return self

    @property
    def root(self) -> Path:
        """Absolute path of the data folder."""
        return Path(self.data_dir).expanduser().resolve()

    @property
    def database_url(self) -> str:
        """Address of the database."""
        return self.database or f"sqlite:///{self.root / 'alto.db'}"

    @property
    def artefact_url(self) -> str:
        """Storage address of files and adapters."""
        return self.artefacts or str(self.root / "artefacts")

    def is_served(self, base_model: str) -> bool:
        """Return whether the vLLM server has the base model that requests call ``base_model``."""
        if self.vllm is None:
            return False
        if self.vllm.base_model in (base_model, self.models.get(base_model)):
            return True
        return not self.hub_models and list(self.models) == [base_model]

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the service."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def load_settings(path: str | Path | None, options: Mapping[str, Any]) -> ServiceSettings:
    """Read settings from a YAML file, if one is given; ``options`` override its values.

    Raises:
        SpecError: The file does not exist, or a value is invalid.
        UnknownKeyError: A key is not a setting.
    """
    written = {} if path is None else read_mapping(Path(path), "settings", "port: 8100")
    if any(not isinstance(key, str) for key in written):
        raise SpecError(f"{path} should have text for keys, found a key of a different type. Put the key in quotes.")
    return ServiceSettings(**{**written, **options})
