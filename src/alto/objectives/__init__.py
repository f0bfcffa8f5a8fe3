"""From hidden states to one loss per job."""

from alto.objectives.sft import sft_losses, sft_sums

__all__ = ["sft_losses", "sft_sums"]
