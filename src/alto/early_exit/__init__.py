"""Decides from loss records which jobs end early, and replays those decisions on recordings. Pure; no torch.

Data flow: `Selection` follows the jobs of a task; it calls its `Policy`, whose rules (`Divergence`,
`OverfittingGap`, `OverfittingUpturn`, or a user's `Rule`) judge one job and whose rungs rank all. `Recording` holds the
curves of a task without early exit, `replay` applies a policy to it, `audit` checks that a live run followed its
policy.
"""

from alto.early_exit.evaluation_budget import LEAST_PAIRS, budgeted
from alto.early_exit.journal import audit, exits_of, selection_of
from alto.early_exit.noise import choose, evaluation_order, interval_of, mean_loss, scores_of
from alto.early_exit.patterns import (
    Collapse,
    Divergence,
    OverfittingGap,
    OverfittingUpturn,
    judge_step_loss,
    magnitude,
    verdict_in_a_row,
)
from alto.early_exit.policy import Policy, policy_from
from alto.early_exit.progress import evaluation_steps, point_at_fraction, rung_notes
from alto.early_exit.recording import RecordedJob, Recording
from alto.early_exit.replay import ReplayResult, replay
from alto.early_exit.selection import Selection
from alto.early_exit.track import Ema
from alto.records import ExitDecision, LossPoint
from alto.spec import Rule

__all__ = [
    "LEAST_PAIRS",
    "Collapse",
    "Divergence",
    "Ema",
    "ExitDecision",
    "LossPoint",
    "OverfittingGap",
    "OverfittingUpturn",
    "Policy",
    "RecordedJob",
    "Recording",
    "ReplayResult",
    "Rule",
    "Selection",
    "audit",
    "budgeted",
    "choose",
    "evaluation_order",
    "evaluation_steps",
    "exits_of",
    "interval_of",
    "judge_step_loss",
    "magnitude",
    "mean_loss",
    "point_at_fraction",
    "policy_from",
    "replay",
    "rung_notes",
    "scores_of",
    "selection_of",
    "verdict_in_a_row",
]
