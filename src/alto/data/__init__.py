"""Reads datasets and makes padding-free batches."""

from alto.data.batch import (
    DataOrder,
    JobRows,
    MixtureOrder,
    PassSize,
    TokenBatch,
    collate,
    mismatched_rows,
    share_rows,
    split_into_micro_batches,
)
from alto.data.dataset import IGNORED, Advantage, EncodedDataset, HeadStore, Span, digest_of, running_digests
from alto.data.encode import encode_prompt
from alto.data.messages import Conversation, LabelledText, Message, Pair, Row
from alto.data.preview import preview_rows
from alto.data.reading import CachedRows, HeldoutRows, read_heldout_rows, read_task_rows
from alto.data.source import is_elsewhere
from alto.data.survey import survey_rows
from alto.data.task_data import EvaluationSplit, TaskData
from alto.data.template import ChatTemplate
from alto.data.tokenize import Encoding, TaskRows, tokenize

__all__ = [
    "IGNORED",
    "Advantage",
    "CachedRows",
    "ChatTemplate",
    "Conversation",
    "DataOrder",
    "EncodedDataset",
    "Encoding",
    "EvaluationSplit",
    "HeadStore",
    "HeldoutRows",
    "JobRows",
    "LabelledText",
    "Message",
    "MixtureOrder",
    "Pair",
    "PassSize",
    "Row",
    "Span",
    "TaskData",
    "TaskRows",
    "TokenBatch",
    "collate",
    "digest_of",
    "encode_prompt",
    "is_elsewhere",
    "mismatched_rows",
    "preview_rows",
    "read_heldout_rows",
    "read_task_rows",
    "running_digests",
    "share_rows",
    "split_into_micro_batches",
    "survey_rows",
    "tokenize",
]
