"""From files to padding-free batches."""

from alto.data.batch import JobRows, TokenBatch, collate, split_into_passes
from alto.data.encode import EncodedDataset, EncodedRow, encode_conversation, encode_dataset
from alto.data.formats import Conversation, Message, read_conversations
from alto.data.split import DataOrder, sample_rows, split_rows
from alto.data.task_data import TaskData, TaskRows, read_task_rows

__all__ = [
    "Conversation",
    "DataOrder",
    "EncodedDataset",
    "EncodedRow",
    "JobRows",
    "Message",
    "TaskData",
    "TaskRows",
    "TokenBatch",
    "collate",
    "encode_conversation",
    "encode_dataset",
    "read_conversations",
    "read_task_rows",
    "sample_rows",
    "split_into_passes",
    "split_rows",
]
