"""Reads datasets and makes padding-free batches."""

from alto.data.batch import (
    BatchTotals,
    DataOrder,
    JobRows,
    MixtureOrder,
    PassSize,
    TokenBatch,
    collate,
    dummy_batch,
    mismatched_rows,
    share_rows,
    split_into_micro_batches,
)
from alto.data.cached_rows import preview_rows, read_task_rows
from alto.data.dataset import IGNORED, EncodedDataset, HeadStore, Span, Unread, digest_of, running_digests
from alto.data.encode import EncodedRow, encode_conversation, encode_prompt
from alto.data.encoders import encode_dataset, encode_pairs
from alto.data.messages import (
    Conversation,
    ConversationWithTools,
    LabelledConversation,
    LabelledText,
    Message,
    Pair,
    Row,
)
from alto.data.reading import HeldoutRows, read_heldout_rows
from alto.data.source import sample_rows, split_rows
from alto.data.task_data import EvaluationSplit, TaskData
from alto.data.task_rows import ReadRows, TaskRows, encode_rows
from alto.data.template import ChatTemplate

__all__ = [
    "IGNORED",
    "BatchTotals",
    "ChatTemplate",
    "Conversation",
    "ConversationWithTools",
    "DataOrder",
    "EncodedDataset",
    "EncodedRow",
    "EvaluationSplit",
    "HeadStore",
    "HeldoutRows",
    "JobRows",
    "LabelledConversation",
    "LabelledText",
    "Message",
    "MixtureOrder",
    "Pair",
    "PassSize",
    "ReadRows",
    "Row",
    "Span",
    "TaskData",
    "TaskRows",
    "TokenBatch",
    "Unread",
    "collate",
    "digest_of",
    "dummy_batch",
    "encode_conversation",
    "encode_dataset",
    "encode_pairs",
    "encode_prompt",
    "encode_rows",
    "mismatched_rows",
    "preview_rows",
    "read_heldout_rows",
    "read_task_rows",
    "running_digests",
    "sample_rows",
    "share_rows",
    "split_into_micro_batches",
    "split_rows",
]
