"""Scores of answers from a server on this machine or from a Python function, and waiting for work that may hang."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import scoring_functions

from alto.errors import SpecError
from alto.evaluation import scoring
from alto.evaluation.scorers import Answer, ScorerFailedError, pause, within
from alto.evaluation.scoring import HttpScorer, PythonScorer
from alto.spec import Scoring

SECRET = "Bearer top-secret"
ANSWERS = [Answer(prompt=f"p{n}", reference=f"r{n}", answer="ä" * n) for n in range(5)]


class Server(ThreadingHTTPServer):
    """A server that answers requests with ``replies`` in turn, each a status and a body; the last one repeats."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.replies: list[tuple[int, bytes | None]] = [(200, None)]
        self.delay_s = 0.0
        self.drips = False
        self.requests: list[tuple[dict[str, str], Any]] = []
        self.url = f"http://127.0.0.1:{self.server_port}/score"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((dict(self.headers), body))
        status, reply = self.server.replies[0]
        if len(self.server.replies) > 1:
            self.server.replies.pop(0)
        time.sleep(self.server.delay_s)
        if reply is None:
            reply = json.dumps({"scores": [len(row["answer"]) / 10 for row in body["rows"]]}).encode()
        self.send_response(status)
        if status == 302:
            self.send_header("Location", self.server.url)
        self.send_header("Content-Length", str(len(reply) + 100 * self.server.drips))
        self.end_headers()
        self.wfile.write(reply)
        while self.server.drips:
            self.wfile.write(b" ")
            self.wfile.flush()
            time.sleep(0.05)

    do_GET = do_POST

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    made.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client that has given up
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.drips = False
    made.shutdown()
    thread.join()
    made.server_close()


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "BACKOFF_S", (0.01, 0.01))


def score(server: Server, **settings: Any) -> list[float]:
    return HttpScorer(Scoring(scorer="http", url=server.url, **settings))(ANSWERS, lambda: None)


def test_rows_are_posted_in_batches_and_their_scores_come_back(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE", json.dumps({"Authorization": SECRET}))
    assert score(server, rows_per_request=2, headers_env="JUDGE") == [0.0, 0.1, 0.2, 0.3, 0.4]
    assert [len(body["rows"]) for _, body in server.requests] == [2, 2, 1]
    headers, body = server.requests[1]
    assert body["rows"][1] == {"prompt": "p3", "reference": "r3", "answer": "äää"}
    assert (headers["Authorization"], headers["Content-Type"]) == (SECRET, "application/json")


@pytest.mark.parametrize("statuses", [(500, 503), (429, 408), (425, 502), (504, 429)])
def test_a_server_that_fails_for_a_moment_is_asked_again(server: Server, statuses: tuple[int, int]) -> None:
    server.replies = [*((status, b"") for status in statuses), (200, None)]
    assert score(server) == [0.0, 0.1, 0.2, 0.3, 0.4]
    assert len(server.requests) == 3


def test_it_waits_before_it_asks_again(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "BACKOFF_S", (0.1, 0.2))
    server.replies = [(500, b""), (500, b""), (200, None)]
    began = time.monotonic()
    score(server)
    assert time.monotonic() - began >= 0.3


@pytest.mark.parametrize(
    ("replies", "message", "num_requests"),
    [
        ([(500, b"")], "status 500 Internal Server Error, 3 times", 3),
        ([(401, b"")], "expected status 200, found status 401 Unauthorized", 1),
        ([(302, b"")], "expected status 200, found status 302 Found", 1),
        ([(202, b'{"scores": [1, 2, 3, 4, 5]}')], "expected status 200, found status 202 Accepted", 1),
        ([(200, b"oops")], "expected {.*} with 5 finite numbers, found no JSON", 1),
        ([(200, b"[" * 100_000)], "expected {.*} with 5 finite numbers, found no JSON", 1),
        ([(200, b"[1, 2]")], "found list", 1),
        ([(200, b'{"score": 1}')], "found an object without such a list", 1),
        ([(200, b'{"scores": [1, 2]}')], "found 2 scores", 1),
        ([(200, b'{"scores": [1, 2, 3, 4, 5, 6]}')], "found 6 scores", 1),
        ([(200, b'{"scores": [1, 2, NaN, 4, 5]}')], "found no such number at position 2", 1),
        ([(200, b'{"scores": [1, 2, 3, true, 5]}')], "found no such number at position 3", 1),
        ([(200, b'{"scores": [1, 2, 3, 4, "5"]}')], "found no such number at position 4", 1),
        ([(200, b'{"scores": [1, 2, 3, 4, 1e999]}')], "found no such number at position 4", 1),
    ],
)
def test_what_is_no_score_of_a_server_is_a_failure_with_its_reason(
    server: Server, replies: list[tuple[int, bytes | None]], message: str, num_requests: int
) -> None:
    server.replies = replies
    with pytest.raises(ScorerFailedError, match=message):
        score(server)
    assert len(server.requests) == num_requests


@pytest.mark.parametrize("drips", [False, True])
def test_a_server_that_is_slow_is_given_up(server: Server, drips: bool) -> None:
    """A server that sends a byte from time to time is given up too, though no socket timeout ends it."""
    server.delay_s, server.drips = (0.0, True) if drips else (2.0, False)
    began = time.monotonic()
    with pytest.raises(ScorerFailedError, match=r"no result within 0.2 s, 3 times"):
        score(server, timeout_s=0.2)
    assert time.monotonic() - began < 5
    assert len(server.requests) == 3


def test_a_server_that_is_not_there(server: Server) -> None:
    gone = Scoring(scorer="http", url="http://127.0.0.1:9/score?key=top-secret")
    with pytest.raises(ScorerFailedError, match=r"http://127.0.0.1:9/score: no connection \(\w+\), 3 times") as failure:
        HttpScorer(gone)(ANSWERS, lambda: None)
    assert "top-secret" not in str(failure.value)


@pytest.mark.parametrize(
    "value", [None, SECRET, json.dumps([SECRET]), json.dumps({"A": f"{SECRET}\nB: 1"}), '{"A": 1}']
)
def test_headers_that_cannot_be_sent_are_refused_at_once_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv("JUDGE", raising=False)
    if value is not None:
        monkeypatch.setenv("JUDGE", value)
    with pytest.raises(SpecError, match=r"select_by.headers_env: expected .* environment variable JUDGE") as refusal:
        HttpScorer(Scoring(scorer="http", url="http://127.0.0.1:9/", headers_env="JUDGE"))
    assert "top-secret" not in str(refusal.value)


ROWS = [Answer(prompt=f"p{n}", reference=f"r{n}", answer="x" * n) for n in range(3)]


def scorer(function: str, timeout_s: float = 30.0) -> PythonScorer:
    return PythonScorer(f"scoring_functions:{function}", timeout_s)


@pytest.mark.parametrize("name", ["scoring_functions:length", "scoring_functions.length"])
def test_the_function_gets_every_row_by_keyword(name: str) -> None:
    scoring_functions.CALLS.clear()
    turns: list[None] = []
    found = PythonScorer(name, 30.0)(ROWS, lambda: turns.append(None))
    assert found == [0.0, 0.01, 0.02]
    assert scoring_functions.CALLS[1] == {"prompt": "p1", "reference": "r1", "answer": "x"}
    assert len(turns) >= len(ROWS)


def test_a_truth_value_is_one_or_zero() -> None:
    rows = [Answer(prompt="", reference="2", answer="It is 2."), Answer(prompt="", reference="2", answer="3")]
    assert scorer("is_right")(rows, lambda: None) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("raising", r"row 1: it raised LookupError: the judge is asleep \(scoring_functions.py, line \d+\)"),
        ("exiting", "row 1: it raised SystemExit: 3"),
        ("text", r"row 1: expected a finite number, found '0.5' \(str\)"),
        ("nothing", r"row 1: expected a finite number, found None \(NoneType\)"),
        ("infinite", "row 1: expected a finite number, found inf"),
    ],
)
def test_what_is_no_score_of_a_function_is_a_failure_with_its_reason(function: str, message: str) -> None:
    with pytest.raises(ScorerFailedError, match=message):
        scorer(function)(ROWS, lambda: None)


def test_a_function_that_hangs_is_given_up() -> None:
    began = time.monotonic()
    with pytest.raises(ScorerFailedError, match=r"row 1: no result within 0.2 s; increase timeout_s"):
        scorer("hanging", 0.2)(ROWS, lambda: None)
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("kind", ["http", "python"])
def test_a_user_who_wants_to_stop_does_not_wait_for_it(server: Server, kind: str) -> None:
    server.delay_s = 2.0
    began = time.monotonic()

    def stop() -> None:
        if time.monotonic() - began > 0.2:
            raise KeyboardInterrupt

    hanging = HttpScorer(Scoring(scorer="http", url=server.url)) if kind == "http" else scorer("hanging")
    with pytest.raises(KeyboardInterrupt):
        hanging(ANSWERS, stop)
    assert time.monotonic() - began < {"http": 1.5, "python": 10}[kind]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:score", "expected a module 'no_such_module' that can be imported, found ModuleNotFoundError"),
        ("scoring_functions:absent", "expected a function 'absent' in the module 'scoring_functions', found none"),
        ("scoring_functions.NOT_A_FUNCTION", "expected a function 'NOT_A_FUNCTION' .* found int"),
    ],
)
def test_a_function_that_is_not_there_is_refused_at_once(name: str, message: str) -> None:
    with pytest.raises(SpecError, match=f"select_by.function: {message}"):
        PythonScorer(name, 30.0)


def interrupt() -> None:
    raise KeyboardInterrupt


def test_a_user_who_wants_to_stop_does_not_wait_for_a_pause() -> None:
    with pytest.raises(KeyboardInterrupt):
        pause(0.2, interrupt)


def test_a_pause_lasts_as_long_as_it_says() -> None:
    began = time.monotonic()
    pause(0.12, lambda: None)
    assert time.monotonic() - began >= 0.12


def test_what_work_returns_or_raises_is_passed_on() -> None:
    assert within(10.0, lambda: 3, lambda: None) == 3
    with pytest.raises(ZeroDivisionError):
        within(10.0, lambda: 1 // 0, lambda: None)
