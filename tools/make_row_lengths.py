"""Write ``benchmarks/kernels/gsm8k_lengths.json``: the lengths of GSM8K's first training rows under two tokenizers.

    python -m tools.make_row_lengths GSM8K_TRAIN_JSONL GPT2_FOLDER

The arguments are GSM8K's ``train.jsonl`` and a folder with GPT-2's ``encoder.json.gz`` and ``vocab.bpe.gz``.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.kernels.lengths import FILE, RowLength

NUM_ROWS = 256


def derive(data: Path, gpt2: Path) -> dict[str, list[RowLength]]:
    """Return the lengths of the first rows in ``data`` under both tokenizers."""
    lines = data.read_text(encoding="utf-8").splitlines()[:NUM_ROWS]
    rows = [(row["question"], row["answer"]) for row in map(json.loads, lines)]
    return {"alto-tiny": _alto_tiny(rows), "gpt2": _gpt2(rows, gpt2)}


def _alto_tiny(rows: Sequence[tuple[str, str]]) -> list[RowLength]:
    from alto.backbone import load_tokenizer
    from alto.data import Conversation, Message
    from alto.data.encode import Encoder
    from alto.spec import BaseModelSpec

    tokenizer = load_tokenizer(BaseModelSpec(id="alto-tiny"))
    lengths = []
    for question, answer in rows:
        conversation = Conversation([Message("user", question), Message("assistant", answer)])
        (row,) = Encoder(tokenizer).rows(conversation)
        lengths.append(RowLength(row.is_trained.index(True), len(row.input_ids)))
    return lengths


def _gpt2(rows: Sequence[tuple[str, str]], folder: Path) -> list[RowLength]:
    from tokenizers import Tokenizer, models, pre_tokenizers

    with gzip.open(folder / "encoder.json.gz", "rt", encoding="utf-8") as file:
        vocabulary = json.load(file)
    with gzip.open(folder / "vocab.bpe.gz", "rt", encoding="utf-8") as file:
        merges = [tuple(line.split()) for line in file.read().split("\n")[1:] if line]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    counts = [[len(tokenizer.encode(text).ids) for text in row] for row in rows]
    return [RowLength(question, question + answer) for question, answer in counts]


if __name__ == "__main__":
    found = derive(Path(sys.argv[1]), Path(sys.argv[2]))
    lines = [f"{json.dumps(name)}: {json.dumps(rows, separators=(',', ':'))}" for name, rows in found.items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
