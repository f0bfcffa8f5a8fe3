"""Scoring of answers by a server, for example one that asks a language model.

Error messages are written here, not by the server or the HTTP library, so that they never contain secrets from the
headers.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from alto.errors import SpecError
from alto.evaluation.deadline import TooLateError, pause, within
from alto.evaluation.scorers import Answer, OnTurn, ScorerFailedError
from alto.spec import Scoring

__all__ = ["HttpScorer"]

NUM_RETRIES = 2
BACKOFF_S = (0.5, 1.0)
"""Seconds to wait before each retry."""

_RETRIED = (408, 425, 429, 500, 502, 503, 504)
_MAX_BYTES = 16 * 1024**2


class HttpScorer:
    """A scorer that posts ``{"rows": [{"prompt", "reference", "answer"}, …]}`` as JSON and reads ``{"scores": […]}``.

    A request that times out, fails to connect or gets a temporary error status is retried twice. Redirects are not
    followed, because they would send the headers to another address.

    Raises:
        SpecError: The environment variable for the headers is not set, or does not hold headers.
    """

    def __init__(self, scoring: Scoring) -> None:
        assert scoring.url is not None
        self._url = scoring.url
        self._address = scoring.address
        self._timeout_s = scoring.timeout_s
        self._rows_per_request = scoring.rows_per_request
        self._headers = {
            "Accept": "application/json",
            "User-Agent": "alto",
            **_headers(scoring.headers_env),
            "Content-Type": "application/json",
        }
        self._opener = urllib.request.build_opener(_NoRedirects)

    def __call__(self, answers: Sequence[Answer], on_turn: OnTurn) -> list[float]:
        scores: list[float] = []
        for start in range(0, len(answers), self._rows_per_request):
            scores += self._scores(answers[start : start + self._rows_per_request], on_turn)
        return scores

    def _scores(self, answers: Sequence[Answer], on_turn: OnTurn) -> list[float]:
        body = json.dumps({"rows": [asdict(one) for one in answers]}).encode()
        failure = ""
        for attempt in range(1 + NUM_RETRIES):
            if attempt:
                pause(BACKOFF_S[attempt - 1], on_turn)
            reply, failure = self._post(body, on_turn)
            if reply is not None:
                return self._checked(reply, len(answers))
        raise ScorerFailedError(f"{self._address}: {failure}, {1 + NUM_RETRIES} times")

    def _post(self, body: bytes, on_turn: OnTurn) -> tuple[bytes | None, str]:
        """Send one request, and return the server's reply; or None and the reason of a failure worth a retry.

        Raises:
            ScorerFailedError: The request failed in a way that a retry cannot fix.
        """

        def ask() -> tuple[int, bytes | None, str]:
            request = urllib.request.Request(self._url, data=body, headers=self._headers, method="POST")
            try:
                with self._opener.open(request, timeout=self._timeout_s) as response:
                    return response.status, response.read(_MAX_BYTES + 1), ""
            except urllib.error.HTTPError as error:
                error.close()
                return error.code, None, ""
            except Exception as error:  # its message may contain the headers
                reason = error.reason if isinstance(error, urllib.error.URLError) else error
                if isinstance(reason, TimeoutError):
                    return 0, None, f"no result within {self._timeout_s:g} s"
                return 0, None, f"no connection ({type(reason).__name__})"

        try:
            status, reply, failure = within(self._timeout_s, ask, on_turn)
        except TooLateError as error:
            return None, str(error)
        if failure or status in _RETRIED:
            return None, failure or _status(status)
        if status != http.client.OK or reply is None:
            raise ScorerFailedError(f"{self._address}: expected status 200, found {_status(status)}")
        return reply, ""

    def _checked(self, reply: bytes, num_rows: int) -> list[float]:
        expected = f'expected {{"scores": […]}} with {num_rows} finite numbers'
        try:
            found: Any = json.loads(reply) if len(reply) <= _MAX_BYTES else None
        except (ValueError, RecursionError):
            raise ScorerFailedError(f"{self._address}: {expected}, found no JSON") from None
        scores = found.get("scores") if isinstance(found, Mapping) else None
        if not isinstance(scores, list):
            what = "an object without such a list" if isinstance(found, Mapping) else type(found).__name__
            raise ScorerFailedError(f"{self._address}: {expected}, found {what}")
        if len(scores) != num_rows:
            raise ScorerFailedError(f"{self._address}: {expected}, found {len(scores)} scores")
        if not all(_is_number(score) for score in scores):
            position = next(at for at, score in enumerate(scores) if not _is_number(score))
            raise ScorerFailedError(f"{self._address}: {expected}, found no such number at position {position}")
        return [float(score) for score in scores]


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        """Return None, so that no redirect is followed and its status counts as an error."""


def _headers(variable: str | None) -> dict[str, str]:
    """Return the headers in an environment variable. Error messages do not contain their values."""
    if variable is None:
        return {}
    remedy = f'set it, for example: export {variable}=\'{{"Authorization": "Bearer …"}}\''
    text = os.environ.get(variable)
    if text is None:
        raise SpecError(
            f"select_by.headers_env: expected the environment variable {variable}, found that it is not set; {remedy}"
        )
    try:
        headers = json.loads(text)
    except ValueError:
        headers = None
    if not isinstance(headers, dict) or not all(_is_header(*pair) for pair in headers.items()):
        raise SpecError(
            f"select_by.headers_env: expected a JSON object of header names and string values in the environment "
            f"variable {variable}, found invalid content; {remedy}"
        )
    return headers


def _is_header(name: str, value: object) -> bool:
    is_name = name.isascii() and name.replace("-", "").replace("_", "").isalnum()
    return is_name and isinstance(value, str) and value.isascii() and value.isprintable()


def _is_number(value: object) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def _status(code: int) -> str:
    return f"status {code} {http.client.responses.get(code, '')}".strip()
