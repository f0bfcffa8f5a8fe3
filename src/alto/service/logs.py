"""Logs with one line per event, without keys, bodies and query strings."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

__all__ = ["configure_logs"]

_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


def configure_logs(*, as_json: bool, level: int = logging.INFO) -> None:
    """Write the logs of the service and of its web server to stderr, and only warnings of all other packages."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines() if as_json else _Lines())
    for name in ("alto.service", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)


def _facts_of(record: logging.LogRecord) -> dict[str, Any]:
    """Return a record's extra fields, except names with a leading underscore, which belong to other packages (Ray)."""
    facts = vars(record).items()
    return {key: value for key, value in facts if key not in _OWN and not key.startswith("_") and value is not None}


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        facts = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_facts_of(record),
        }
        if record.exc_info:
            facts["exception"] = self.formatException(record.exc_info)
        return json.dumps(facts, default=str)


class _Lines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        facts = " ".join(f"{key}={value}" for key, value in _facts_of(record).items() if key != "color_message")
        line = f"{time.strftime('%H:%M:%S')} {record.levelname.lower()} {record.getMessage()} {facts}".rstrip()
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line
