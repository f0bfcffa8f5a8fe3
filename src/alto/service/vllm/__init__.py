"""Serving of finished adapters by a vLLM server: registration, model names, and forwarded requests."""

from alto.service.vllm.registrar import Registrar, registering

__all__ = ["Registrar", "registering"]
