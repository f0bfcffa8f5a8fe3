"""``alto serve`` and ``alto keys``."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from alto.cli.output import print_json
from alto.errors import SpecError, UnsupportedError
from alto.version import install_command

if TYPE_CHECKING:
    from alto.service.settings import ServiceSettings
    from alto.service.store import Store
    from alto.service.store.tables import KeyRow

keys = typer.Typer(name="keys", help="Keys of a service's users.", no_args_is_help=True, add_completion=False)

SettingsFile = Annotated[
    str | None, typer.Option("--settings", metavar="FILE", help="YAML file of settings (docs/service.md).")
]
DataDir = Annotated[str | None, typer.Option("--data-dir", help="Folder of runs, files and the database.")]
Database = Annotated[
    str | None, typer.Option("--database", help="Address of the database, such as postgresql+psycopg://….")
]

_DURATION = re.compile(r"(\d+)([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 24 * 3600}


def serve(
    settings: SettingsFile = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on; one that other machines reach needs keys.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free port.")] = None,
    data_dir: DataDir = None,
    database: Database = None,
    model: Annotated[
        list[str] | None, typer.Option("--model", metavar="NAME=MODEL", help="Offer a base model.")
    ] = None,
    hub_models: Annotated[bool | None, typer.Option(help="Let requests name any model of the hub.")] = None,
    cluster: Annotated[str | None, typer.Option(help="Where tasks run, as with alto run.")] = None,
    total_gpus: Annotated[int | None, typer.Option(help="Maximum number of GPUs, or of CPU slots, to use.")] = None,
    vllm_cache: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Folder of vLLM's filesystem resolver, in which adapters are put."),
    ] = None,
) -> None:
    """Serve tuning to many users: OpenAI's fine-tuning API, ALTO's own API, and a dashboard."""
    with _service_installed():
        from alto.service.serve import serve as run
        from alto.service.settings import load_settings
    options: dict[str, Any] = {
        "host": host,
        "port": port,
        "data_dir": data_dir,
        "database": database,
        "hub_models": hub_models,
        "cluster": cluster,
        "total_gpus": total_gpus,
        "models": _models(model) if model else None,
    }
    found = load_settings(settings, {key: value for key, value in options.items() if value is not None})
    if vllm_cache is not None:
        if found.vllm is None:
            raise SpecError(
                "--vllm-cache: expected a vLLM server in the settings (key vllm), found none; add its address and base "
                "model to the file of --settings"
            )
        found = found.replace(vllm=found.vllm.replace(cache=vllm_cache))
    run(
        found,
        on_ready=lambda url: typer.echo(
            f"ALTO answers at {url} (OpenAI's API under {url}/v1, dashboard at {url}/), data in {found.root}"
        ),
    )


@keys.command("create")
def create(
    tenant: Annotated[
        str, typer.Argument(help="Tenant whose files, tasks and models the key opens; created if it is new.")
    ],
    name: Annotated[str | None, typer.Option(help="What the key is for.")] = None,
    scopes: Annotated[str, typer.Option(help="read, write and chat, separated by commas.")] = "read,write,chat",
    expires: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION", help="Time until the key expires, such as 30m, 12h or 90d; by default it never does."
        ),
    ] = None,
    max_gpus: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of GPUs that the tenant uses at a time.")
    ] = None,
    max_tasks: Annotated[int | None, typer.Option(min=1, help="Maximum number of open tasks of the tenant.")] = None,
    max_bytes: Annotated[
        int | None, typer.Option(min=1, help="Maximum size of the tenant's files and runs, in bytes.")
    ] = None,
    requests_per_s: Annotated[
        float | None, typer.Option(min=0.001, help="Maximum number of requests of the tenant per second.")
    ] = None,
    share_executors: Annotated[
        bool | None,
        typer.Option(help="Train the tenant's tasks together with tasks of other tenants that allow it too."),
    ] = None,
    settings: SettingsFile = None,
    data_dir: DataDir = None,
    database: Database = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Make a key and print its secret, which is not stored; the limits apply to its tenant."""
    from alto.service.access import create_key, create_tenant

    limits = {
        "max_gpus": max_gpus,
        "max_tasks": max_tasks,
        "max_bytes": max_bytes,
        "requests_per_s": requests_per_s,
        "shares_executors": share_executors,
    }
    expires_at = None if expires is None else int(time.time()) + _duration_s(expires)
    with _opened(settings, data_dir, database, creates=True) as store, store.writing() as session:
        create_tenant(session, tenant, {key: value for key, value in limits.items() if value is not None})
        wanted = [scope.strip() for scope in scopes.split(",") if scope.strip()]
        row, secret = create_key(session, tenant, name=name or "", scopes=wanted, expires_at=expires_at)
    if as_json:
        new = store.place if store.is_new else None
        print_json({"id": row.id, "tenant": tenant, "secret": secret, "expires_at": expires_at, "database": new})
    else:
        if store.is_new:
            typer.echo(f"Created the database {store.place}; a server has to use the same one to know this key.")
        typer.echo(f"{row.id} of {tenant}. Its secret is shown once:\n{secret}")


@keys.command("list")
def list_(
    tenant: Annotated[str | None, typer.Option(help="List only the keys of this tenant.")] = None,
    settings: SettingsFile = None,
    data_dir: DataDir = None,
    database: Database = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the limits of tenants, and keys without their secrets."""
    from alto.service.access import limits_of_tenants, list_keys

    with _opened(settings, data_dir, database) as store, store.reading() as session:
        rows, limits = list_keys(session, tenant), limits_of_tenants(session)
    if as_json:
        print_json({"keys": [_facts_of(row) | {"limits": limits[row.tenant]} for row in rows]})
        return
    for name in dict.fromkeys(row.tenant for row in rows):
        own = ", ".join(f"{key} {value}" for key, value in limits[name].items() if value is not None)
        if own:
            typer.echo(f"limits of {name}: {own}")
    for row in rows:
        typer.echo(f"{row.id}  {row.tenant}  {_described_state(row)}  {','.join(row.scopes)}  {row.name}".rstrip())
    if not rows:
        of_tenant = "" if tenant is None else f" of {tenant}"
        typer.echo(f"There are no keys{of_tenant}; make one with: alto keys create {tenant or 'TENANT'}")


@keys.command("revoke")
def revoke(
    key: Annotated[str, typer.Argument(help="Id of the key.")],
    settings: SettingsFile = None,
    data_dir: DataDir = None,
    database: Database = None,
) -> None:
    """Revoke a key; its next request is refused."""
    from alto.service.access import revoke_key

    with _opened(settings, data_dir, database) as store, store.writing() as session:
        row = revoke_key(session, key)
    typer.echo(f"{row.id} of {row.tenant} was revoked.")


@contextmanager
def _service_installed() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise UnsupportedError(
            f"service: expected the packages of the extra 'service', found that {error.name} is not installed; install "
            f"them with: {install_command('service')}"
        ) from error


@contextmanager
def _opened(
    settings: str | None, data_dir: str | None, database: str | None, *, creates: bool = False
) -> Iterator[Store]:
    """Yield the database of a service, after migrating it."""
    with _service_installed():
        from alto.service.database import opened_store
        from alto.service.settings import load_settings
    options = {"data_dir": data_dir, "database": database}
    found: ServiceSettings = load_settings(
        settings, {key: value for key, value in options.items() if value is not None}
    )
    with opened_store(found, creates=creates) as store:
        yield store


def _facts_of(row: KeyRow) -> dict[str, Any]:
    names = ("id", "tenant", "name", "scopes", "created_at", "expires_at")
    return {name: getattr(row, name) for name in names} | {"state": _state_of(row)}


def _state_of(row: KeyRow) -> str:
    if row.revoked_at is not None:
        return "revoked"
    return "expired" if row.expires_at is not None and row.expires_at <= time.time() else "valid"


def _described_state(row: KeyRow) -> str:
    state = _state_of(row)
    if row.expires_at is None or state == "revoked":
        return state
    word = "since" if state == "expired" else "until"
    return f"{state} {word} {time.strftime('%Y-%m-%d %H:%M', time.gmtime(row.expires_at))} UTC"


def _models(given: list[str]) -> dict[str, str]:
    found = {}
    for each in given:
        name, equals, model = each.partition("=")
        if not name or (equals and not model):
            raise SpecError(f"--model: expected NAME=MODEL, found {each!r}; for example: --model tiny=alto-tiny")
        found[name] = model or name
    return found


def _duration_s(text: str) -> int:
    found = _DURATION.fullmatch(text)
    if found is None:
        raise SpecError(
            f"--expires: expected seconds, minutes, hours or days such as 45s, 30m, 12h or 90d, found "
            f"{text!r}; correct it"
        )
    return int(found[1]) * _SECONDS[found[2]]
