"""The OpenAPI document, ``/openapi.json``: what every operation needs, besides its own description."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

__all__ = ["WITHOUT_KEY", "describe_keys"]

WITHOUT_KEY: dict[str, Any] = {"security": []}
"""Extra OpenAPI fields of an operation that needs no key."""

_SCHEME = "key"


def describe_keys(app: FastAPI) -> None:
    """Declare in the OpenAPI document of ``app`` that requests have a key in their headers."""
    openapi = app.openapi

    def described() -> dict[str, Any]:
        document = openapi()
        schemes = document.setdefault("components", {}).setdefault("securitySchemes", {})
        schemes[_SCHEME] = {
            "type": "http",
            "scheme": "bearer",
            "description": "A key of a tenant, created with: alto keys create. While a service has no keys, it needs "
            "none, and answers only requests from its own machine.",
        }
        document["security"] = [{_SCHEME: []}]
        return document

    app.openapi = described  # type: ignore[method-assign]
