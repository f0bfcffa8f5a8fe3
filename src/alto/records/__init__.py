"""The facts that packages exchange: frozen, plain, no torch.

A record states what happened or what was decided; it has no behaviour beyond derived values.
"""

from alto.records.data import (
    DataPreview,
    LabelSet,
    ModelLimits,
    PreviewExample,
    ProblemType,
    RowLabel,
    Segments,
)
from alto.records.evaluation import (
    AdapterEvaluation,
    Evaluation,
    EvaluationResult,
    GenerationBackend,
    Metric,
    Prediction,
)
from alto.records.exports import ExportForm, ExportResult, ForeignTool, GgufType
from alto.records.jobs import (
    ExitDecision,
    ExitReason,
    JobResult,
    LossPoint,
    Rung,
    RungResult,
    SplitLoss,
    Standing,
    StartValue,
    exit_reason,
)
from alto.records.measurements import MemoryPoint, MemoryProfile, PackingForecast, TaskPlan, Throughput, ThroughputPoint
from alto.records.results import AdapterCheck, FinalistScore, Judgement, Lead, TaskOutcome
from alto.records.scheduling import (
    MAX_DURATION_S,
    MIN_DURATION_S,
    Gpu,
    Node,
    Placement,
    Schedule,
    Sharing,
    SimulationOutcome,
    TaskEstimate,
)

__all__ = [
    "MAX_DURATION_S",
    "MIN_DURATION_S",
    "AdapterCheck",
    "AdapterEvaluation",
    "DataPreview",
    "Evaluation",
    "EvaluationResult",
    "ExitDecision",
    "ExitReason",
    "ExportForm",
    "ExportResult",
    "FinalistScore",
    "ForeignTool",
    "GenerationBackend",
    "GgufType",
    "Gpu",
    "JobResult",
    "Judgement",
    "LabelSet",
    "Lead",
    "LossPoint",
    "MemoryPoint",
    "MemoryProfile",
    "Metric",
    "ModelLimits",
    "Node",
    "PackingForecast",
    "Placement",
    "Prediction",
    "PreviewExample",
    "ProblemType",
    "RowLabel",
    "Rung",
    "RungResult",
    "Schedule",
    "Segments",
    "Sharing",
    "SimulationOutcome",
    "SplitLoss",
    "Standing",
    "StartValue",
    "TaskEstimate",
    "TaskOutcome",
    "TaskPlan",
    "Throughput",
    "ThroughputPoint",
    "exit_reason",
]
