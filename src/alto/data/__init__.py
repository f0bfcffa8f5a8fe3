"""Reads datasets and makes padding-free batches."""

from alto.data.batch import (
    BatchTotals,
    JobRows,
    PassSize,
    TokenBatch,
    collate,
    dummy_batch,
    share_rows,
    split_into_micro_batches,
)
from alto.data.conversation import Conversation, ConversationWithTools, LabelledConversation, Message, Pair
from alto.data.dataset import IGNORED, EncodedDataset, Span, Unread, digest_of
from alto.data.encode import EncodedRow, encode_conversation, encode_dataset, encode_prompt
from alto.data.mismatched import mismatched_rows
from alto.data.mixture import MixtureOrder
from alto.data.pairs import encode_pairs
from alto.data.preview import preview_rows
from alto.data.split import DataOrder, sample_rows, split_rows
from alto.data.task_data import (
    EvaluationSplit,
    HeldoutRows,
    TaskData,
    TaskRows,
    encode_rows,
    read_heldout_rows,
    read_task_rows,
)

__all__ = [
    "IGNORED",
    "BatchTotals",
    "Conversation",
    "ConversationWithTools",
    "DataOrder",
    "EncodedDataset",
    "EncodedRow",
    "EvaluationSplit",
    "HeldoutRows",
    "JobRows",
    "LabelledConversation",
    "Message",
    "MixtureOrder",
    "Pair",
    "PassSize",
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
    "sample_rows",
    "share_rows",
    "split_into_micro_batches",
    "split_rows",
]
