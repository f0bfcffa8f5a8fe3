"""Computes the losses of an output head, and their gradients, in one kernel."""

from __future__ import annotations

from types import ModuleType

import torch

from alto.backbone.bare_copies import is_near
from alto.backbone.output_head import OutputHead
from alto.kernels.layer_reference import cross_entropy

__all__ = ["sample_losses", "why_no_kernel"]

_NUM_TOKENS, _MAX_TRIED = 3, 10_000
_MAX_ROUNDINGS = 4


def why_no_kernel(head: OutputHead, functions: ModuleType) -> str:
    """Return why a kernel cannot compute the losses of the logits of ``head``; empty if it can.

    Args:
        head: The output head, already observed.
        functions: :mod:`alto.kernels.layer_functions`.
    """
    if head.scale is not None or head.softcap is not None:
        return "its logits are scaled" if head.softcap is None else "its logits are capped"
    weight_VH = head.linear.weight
    width = min(weight_VH.shape[0], _MAX_TRIED)
    generator = torch.Generator().manual_seed(0)
    logits_CV = (3 * torch.randn(_NUM_TOKENS, width, generator=generator)).to(weight_VH.device, weight_VH.dtype)
    targets_C = torch.tensor([0, width // 2, width - 1], device=logits_CV.device)
    results = []
    for function in (functions.cross_entropy, cross_entropy):
        gradient_CV = logits_CV.clone()
        results.append((function(gradient_CV, targets_C, gradient_CV), gradient_CV))
    (losses_C, gradient_CV), (expected_C, expected_CV) = results
    is_same = is_near(losses_C, expected_C, 1e-5) and is_near(
        gradient_CV, expected_CV, _MAX_ROUNDINGS * torch.finfo(logits_CV.dtype).eps
    )
    return "" if is_same else "the kernel's numbers differ from those of PyTorch"


def sample_losses(head: OutputHead, dtype: torch.dtype, device: torch.device) -> None:
    """Launch the loss kernel of ``head`` once on one token, with and without a gradient; for the other arguments see
    :meth:`alto.backbone.fused_forward.FusedForward.sample`."""
    if head.kernel is None:
        return
    logits_CV = torch.empty(1, head.linear.weight.shape[0], dtype=dtype, device=device)
    targets_C = torch.zeros(1, dtype=torch.long, device=device)
    for gradient_CV in (None, logits_CV):
        head.kernel(logits_CV, targets_C, gradient_CV)
