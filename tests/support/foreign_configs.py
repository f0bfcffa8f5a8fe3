"""Configurations from the documentation of LLaMA-Factory, Axolotl and TRL, with rows of their own.

They are the files of ``tests/importing/documented``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NUM_ROWS = 24
DOCUMENTED = Path(__file__).parents[1] / "importing" / "documented"
_TOOLS = {"llamafactory": "LLaMA-Factory", "axolotl": "Axolotl", "trl": "TRL"}

CONFIGS: Mapping[str, tuple[str, str]] = {
    path.name: (_TOOLS[path.name.partition("-")[0]], path.read_text(encoding="utf-8"))
    for path in sorted(DOCUMENTED.iterdir())
}
"""File name, tool and text of each configuration."""

LOCAL_ROWS: Mapping[str, str] = {
    "trl-lib/ultrafeedback_binarized": "data/ultrafeedback.jsonl",
    "trl-lib/kto-mix-14k": "data/kto_mix.jsonl",
}
"""Files with rows of the right form, by the hub dataset that a configuration names."""

DATASET_INFO: Mapping[str, Any] = {
    "identity": {"file_name": "identity.json"},
    "alpaca_en_demo": {"file_name": "alpaca.jsonl"},
    "dpo_en_demo": {
        "file_name": "sharegpt_pairs.json",
        "ranking": True,
        "formatting": "sharegpt",
        "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"},
    },
    "kto_en_demo": {
        "file_name": "kto_en_demo.json",
        "formatting": "sharegpt",
        "columns": {"messages": "messages", "kto_tag": "label"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
    },
    "ultrachat_200k": {
        "hf_hub_url": "HuggingFaceH4/ultrachat_200k",
        "split": "train_sft",
        "formatting": "sharegpt",
        "columns": {"messages": "messages"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
    },
    "openorca": {
        "hf_hub_url": "Open-Orca/OpenOrca",
        "columns": {"prompt": "question", "response": "response", "system": "system_prompt"},
    },
    "mllm_demo": {
        "file_name": "mllm_demo.json",
        "formatting": "sharegpt",
        "columns": {"messages": "messages", "images": "images"},
    },
}


def write_configs(folder: Path) -> Path:
    """Write all configurations into ``folder``, and the rows that they name into ``folder/data``."""
    data = folder / "data"
    data.mkdir(parents=True)
    sums = [(f"{n} plus {n % 7}?", f"It is {n + n % 7}.", f"It is {n + n % 7 + 1}.") for n in range(NUM_ROWS)]
    rows: dict[str, list[dict[str, Any]]] = {
        "identity.json": [{"instruction": asks, "input": "", "output": says} for asks, says, _ in sums],
        "alpaca.jsonl": [{"instruction": "Add.", "input": asks, "output": says} for asks, says, _ in sums],
        "sharegpt_pairs.json": [
            {
                "conversations": [{"from": "human", "value": asks}],
                "chosen": {"from": "gpt", "value": says},
                "rejected": {"from": "gpt", "value": wrong},
            }
            for asks, says, wrong in sums
        ],
        "labelled.jsonl": [
            {"prompt": asks, "completion": says if number % 2 else wrong, "label": bool(number % 2)}
            for number, (asks, says, wrong) in enumerate(sums)
        ],
        "kto_en_demo.json": [
            {"messages": [_user(asks), _assistant(says if number % 2 else wrong)], "label": bool(number % 2)}
            for number, (asks, says, wrong) in enumerate(sums)
        ],
        "chat.jsonl": [
            {"conversations": [{"from": "human", "value": asks}, {"from": "gpt", "value": says}]}
            for asks, says, _ in sums
        ],
        "texts.jsonl": [{"body": f"{asks} {says}"} for asks, says, _ in sums],
        "chat_messages.jsonl": [{"messages": [_user(asks), _assistant(says)]} for asks, says, _ in sums],
        "chat_pairs.jsonl": [
            {"conversation": [_user(asks)], "chosen": _assistant(says), "rejected": _assistant(wrong)}
            for asks, says, wrong in sums
        ],
        "ultrafeedback.jsonl": [
            {
                "chosen": [_user(asks), _assistant(says)],
                "rejected": [_user(asks), _assistant(wrong)],
                "score_chosen": 9.0,
                "score_rejected": 2.0,
            }
            for asks, says, wrong in sums
        ],
        "kto_mix.jsonl": [
            {
                "prompt": [_user(asks)],
                "completion": [_assistant(says if number % 2 else wrong)],
                "label": bool(number % 2),
            }
            for number, (asks, says, wrong) in enumerate(sums)
        ],
    }
    for name, found in rows.items():
        text = json.dumps(found) if name.endswith(".json") else "".join(json.dumps(row) + "\n" for row in found)
        (data / name).write_text(text, encoding="utf-8")
    (data / "dataset_info.json").write_text(json.dumps(DATASET_INFO), encoding="utf-8")
    for name, (_, text) in CONFIGS.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}
