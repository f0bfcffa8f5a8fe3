"""From files to padding-free batches."""

from alto.data.batch import JobRows, TokenBatch, collate, split_into_passes
from alto.data.encode import EncodedDataset, EncodedRow, encode_conversation, encode_dataset
from alto.data.formats import Conversation, Message, read_conversations
from alto.data.split import DataOrder, sample_rows, split_rows
from alto.data.task_data import TaskData, count_training_rows, load_task_data

__all__ = [
    "Conversation",
    "DataOrder",
    "EncodedDataset",
    "EncodedRow",
    "JobRows",
    "Message",
    "TaskData",
    "TokenBatch",
    "collate",
    "count_training_rows",
    "encode_conversation",
    "encode_dataset",
    "load_task_data",
    "read_conversations",
    "sample_rows",
    "split_into_passes",
    "split_rows",
]
