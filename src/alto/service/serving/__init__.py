"""Finished adapters on a vLLM server: registration, the names that answer, and requests that are passed on to it."""

from alto.service.serving.registrar import Registrar, registering

__all__ = ["Registrar", "registering"]
