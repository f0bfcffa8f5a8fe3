"""The base model that adapters are measured on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from alto.backbone import Backbone, load_backbone

__all__ = ["BaseModel"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModel:
    """Which it is, and how it is loaded; see :func:`alto.backbone.load_backbone`."""

    model: str
    dtype: str = "auto"
    load_in_4bit: bool = False
    load_in_8bit: bool = False
    device: torch.device | str = "cpu"
    trust_remote_code: bool = False
    use_safetensors: bool = True

    def load(self) -> Backbone:
        """Load it; raises as :func:`alto.backbone.load_backbone` does."""
        return load_backbone(
            self.model,
            dtype=self.dtype,
            load_in_4bit=self.load_in_4bit,
            load_in_8bit=self.load_in_8bit,
            device=self.device,
            trust_remote_code=self.trust_remote_code,
            use_safetensors=self.use_safetensors,
        )
