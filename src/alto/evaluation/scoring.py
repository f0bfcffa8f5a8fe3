"""The scorer that a task or an evaluation selects, and the rows that it can score."""

from __future__ import annotations

import http.client
import json
import math
import os
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from alto.base import FunctionFailedError, described_error, imported_function, is_number
from alto.data import ChatTemplate, Conversation, LabelledText, Pair, Row
from alto.errors import DataError, SpecError
from alto.evaluation.generate import reply_text
from alto.evaluation.matching import check_keys, matching_of, tool_calls_in
from alto.evaluation.scorers import (
    Answer,
    OnTurn,
    Scorer,
    ScorerFailedError,
    TooLateError,
    pause,
    reply_position,
    within,
)
from alto.records import ScorerName
from alto.spec import Scoring

# Scoring of answers by a server, for example one that asks a language model.
#
# Error messages are written here, not by the server or the HTTP library, so that they never contain secrets from the
# headers.

NUM_RETRIES = 2
BACKOFF_S = (0.5, 1.0)
"""Seconds to wait before each retry."""

_RETRIED = (408, 425, 429, 500, 502, 503, 504)
_MAX_BYTES = 16 * 1024**2
_MOST = sys.float_info.max


class HttpScorer:
    """A scorer that posts ``{"rows": [{"prompt", "reference", "answer"}, …]}`` as JSON and reads ``{"scores": […]}``.

    A request that times out, fails to connect or gets a temporary error status is retried twice. Redirects are not
    followed, because they would send the headers to another address.

    Raises:
        SpecError: The environment variable for the headers is not set, or does not contain headers.
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
        position = next((at for at, score in enumerate(scores) if not is_number(score, least=-_MOST, most=_MOST)), None)
        if position is not None:
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


def _status(code: int) -> str:
    return f"status {code} {http.client.responses.get(code, '')}".strip()


NO_FUNCTION = (
    "correct the name, or install its package (for a module in a different folder, set the environment variable "
    "PYTHONPATH)"
)
"""The remedy for a function that cannot be imported."""


class PythonScorer:
    """A scorer that calls ``function(prompt=…, reference=…, answer=…)`` for one row after another, in separate threads
    of this process.

    Args:
        name: Dotted name of the function; it is imported and runs with all rights of this process.

    Raises:
        SpecError: The function does not exist.
    """

    def __init__(self, name: str, timeout_s: float) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._function = _imported(name)

    def __call__(self, answers: Sequence[Answer], on_turn: OnTurn) -> list[float]:
        return [self._score(number, one, on_turn) for number, one in enumerate(answers, start=1)]

    def _score(self, number: int, one: Answer, on_turn: OnTurn) -> float:
        def call() -> tuple[Any, str]:
            try:
                return self._function(prompt=one.prompt, reference=one.reference, answer=one.answer), ""
            except BaseException as error:  # includes SystemExit
                return None, described_error(error)

        try:
            found, failure = within(self._timeout_s, call, on_turn)
        except TooLateError as error:
            raise ScorerFailedError(f"{self._name}: row {number}: {error}; increase timeout_s") from None
        if failure:
            raise ScorerFailedError(f"{self._name}: row {number}: it raised {failure}")
        try:
            score = math.nan if isinstance(found, str | bytes) else float(found)
        except Exception:
            score = math.nan
        if not math.isfinite(score):
            raise ScorerFailedError(
                f"{self._name}: row {number}: expected a finite number, found {found!r:.60} ({type(found).__name__})"
            )
        return score


def _imported(name: str) -> Callable[..., object]:
    try:
        return imported_function(name)
    except FunctionFailedError as error:
        raise SpecError(f"select_by.function: {error}; {NO_FUNCTION}") from error


def scorer_of(scoring: Scoring) -> Scorer:
    """Return the scorer of generated texts that ``scoring`` selects.

    Raises:
        SpecError: The Python function does not exist, or the request headers are not set.
    """
    matching = matching_of(scoring)
    if matching is not None:
        return matching
    if scoring.scorer == "python":
        assert scoring.function is not None
        return PythonScorer(scoring.function, scoring.timeout_s)
    assert scoring.scorer == "http", "multiple choice generates no texts"
    return HttpScorer(scoring)


def needed_of(scoring: Scoring) -> str:
    """Return the property that a row's reply needs to be scored; it completes the phrase "replies that ..."."""
    matching = matching_of(scoring)
    return "are text after a prompt" if matching is None else matching.needed


def scorable(rows: Sequence[Row], scoring: Scoring) -> list[Conversation]:
    """Return the rows that ``scoring`` can score."""
    matching = matching_of(scoring)
    found = []
    for row in rows:
        reference = "" if isinstance(row, Pair | LabelledText) else _reference(row, scoring)
        if reference and (matching is None or matching.read(reference) is not None):
            assert not isinstance(row, Pair | LabelledText)
            found.append(row)
    return found


def fitting_scorer(rows: Sequence[Row]) -> ScorerName:
    """Return the built-in scorer that suits the replies of ``rows``: the one that reads what all of them have, a tool
    call, a number at the end, or JSON; else ``exact`` for short replies, and ``similarity`` for others.

    Raises:
        DataError: A row has no prompt or no reply.
    """
    exact = Scoring(scorer="exact")
    replies = [_reference(row, exact) for row in scorable(rows, exact)]
    if len(replies) < len(rows):
        raise DataError(
            f"expected rows of a prompt and a reply, found {len(rows) - len(replies)} without a prompt; name other "
            "columns, or choose another goal"
        )

    def fits(scorer: ScorerName, form: str) -> bool:
        is_read = len(scorable(rows, Scoring(scorer=scorer))) == len(rows)
        return is_read and all(re.search(form, reply, re.DOTALL) for reply in replies)

    if fits("tool_call", ""):
        return "tool_call"
    if fits("numeric", r"\d\W*$"):
        return "numeric"
    if fits("json", r"^\s*[{\[]"):
        return "json"
    return "exact" if max(map(len, replies), default=0) <= _MOST_EXACT_CHARS else "similarity"


_MOST_EXACT_CHARS = 60
"""Length of replies that a model may hit exactly."""


def check_key_names(rows: Sequence[Row], scoring: Scoring) -> None:
    """Check that every key to compare is in at least one reply, if any replies have JSON values.

    Raises:
        DataError: A key is in no reply.
    """
    if scoring.keys and (with_values := scorable(rows, Scoring(scorer="json"))):
        check_keys(scoring, [_reference(row, scoring) for row in with_values])


def check_references(rows: Sequence[Conversation], scoring: Scoring, tokenizer: Any) -> None:
    """Check that correct answers to ``rows``, which can be scored, would be recognised.

    Raises:
        DataError: A key to compare is in no row, or the chat template writes tool calls in a form that ALTO cannot
            read.
    """
    check_keys(scoring, [_reference(row, scoring) for row in rows])
    if scoring.scorer != "tool_call":
        return
    for row in rows:
        position = reply_position(row)
        if position is None or not row[position].other_keys().get("tool_calls"):
            continue
        wanted = tool_calls_in(_reference(row, scoring))
        written = ChatTemplate(tokenizer).text(row[: position + 1], open_turn=False)
        if tool_calls_in(written)[-len(wanted) :] != wanted:
            raise DataError(
                "expected a chat template that writes tool calls as JSON objects with name and arguments, found "
                f"{written.strip()[-200:]!r}; use scorer python with a function that reads this format"
            )
        return


def _reference(row: Conversation, scoring: Scoring) -> str:
    """Return the reply of ``row`` with which answers are compared; empty if there is none."""
    position = reply_position(row)
    if position is None:
        return ""
    # The other scorers compare texts, in which the form of a tool call depends on the chat template.
    reads_calls = scoring.scorer in ("tool_call", "python", "http")
    return reply_text(row[position]) if reads_calls or row[position].content.strip() else ""
