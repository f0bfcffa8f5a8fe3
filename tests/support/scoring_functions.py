"""Functions that tests name as ``select_by.function``."""

from __future__ import annotations

import sys
import time

CALLS: list[dict[str, str]] = []


def length(*, prompt: str, reference: str, answer: str) -> float:
    CALLS.append({"prompt": prompt, "reference": reference, "answer": answer})
    return len(answer) / 100


def is_right(prompt: str, reference: str, answer: str) -> bool:
    return reference in answer


def constant(**_: str) -> int:
    return 1


def raising(**_: str) -> float:
    raise LookupError("the judge is asleep")


def exiting(**_: str) -> float:
    sys.exit(3)


def hanging(**_: str) -> float:
    time.sleep(60)
    return 1.0


def text(**_: str) -> str:
    return "0.5"


def nothing(**_: str) -> None:
    return None


def infinite(**_: str) -> float:
    return float("inf")


def huge(**_: str) -> float:
    return 1e308


NOT_A_FUNCTION = 3
