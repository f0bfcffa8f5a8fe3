"""Loads every export of every kind of adapter into the servers that people use, and compares the answers with PEFT's.

    make test-servers

Servers run in an environment of their own (``.venv-servers``), because they pin other versions of PyTorch. Without it,
their cells say that they were not tried.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

from alto.backbone import resolve_model
from benchmarks.common import ROOT, option_parser, readable_model
from benchmarks.pieces import Flush, Piece, Study, piece_name, run_pieces
from benchmarks.servers.adapters import (
    CLASSIFIER,
    KINDS,
    Answer,
    Exported,
    answers_of,
    dump,
    export,
    peft_model,
    read_answers,
    scores_of,
    train,
)
from benchmarks.servers.vllm_server import RefusedError, Server, serving

SERVERS = ROOT / ".venv-servers"
"""Environment that ``make test-servers`` sets up."""

GOALS = {"cells_wrong": ("<=", 0.0), "cells_untried": ("<=", 0.0)}

MODELS: Mapping[str, tuple[str, ...]] = {
    "smoke": ("alto-tiny",),
    "cpu": tuple(str(ROOT / ".models" / name) for name in ("smollm2-135m", "gemma-3-270m")),
}
KINDS_OF = {"smoke": ("lora", "dora", CLASSIFIER), "cpu": tuple(KINDS)}

FLOAT32_TOLERANCE = 1e-3
"""Largest difference of log-probabilities of servers that compute in float32."""
_NOISE_FACTOR = 4.0
"""A server that rounds may differ by this many times as much as it does with the plain base model."""
_LABEL_TOLERANCE = 1e-4
_LEAST_EFFECT = 0.1
"""Least difference of a log-probability that an adapter must make."""
_CHILD_S = 600

Verdict = Literal["equal", "refused", "wrong", "untried"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One export of one adapter in one server.

    Attributes:
        verdict: ``equal``: answers as PEFT does; ``refused``: ALTO says beforehand that it cannot be served; if there
            is an export, the server was seen to refuse it; ``wrong``: anything else that was tried; ``untried``: the
            server is not installed.
        worst: Largest difference of a log-probability (of a probability for a classifier); NaN if there is none.
        texts: Number of equal answers; for a classifier, of all answers.
        tolerance: Largest allowed ``worst``.
        why: Reason for any verdict but ``equal``.
    """

    export: str
    server: str
    verdict: Verdict
    worst: float = math.nan
    texts: int = 0
    tolerance: float = math.nan
    why: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    with contextlib.ExitStack() as stack:
        matrices: dict[str, Matrix] = {}

        def measure(model: str, kind: str, piece: Piece, flush: Flush) -> None:
            if model not in matrices:
                matrices[model] = stack.enter_context(opened(resolve_model(model), options.servers))
            for cell in matrices[model].cells(kind):
                row = {"model": Path(model).name, "kind": kind, **_plain(cell)}
                piece.rows.append(row)
                if cell.verdict == "wrong":
                    piece.failures.append(f"{row['model']}, {kind}, {cell.export} in {cell.server}: {cell.why}")
                print(f"{row['model']} {kind} {cell.export} {cell.server}: {cell.verdict} {row['why']}", flush=True)
                flush()

        chosen = {
            piece_name(Path(model).name, kind): partial(measure, model, kind)
            for model in options.models
            for kind in options.kinds
        }
        return run_pieces(study_of(options), chosen, options.out)


def study_of(options: argparse.Namespace) -> Study:
    """Return the study of the models of a scale and of the named models."""
    names = dict.fromkeys(Path(model).name for model in (*MODELS[options.scale], *options.models))
    return Study(
        benchmark="servers",
        scale=options.scale,
        pieces=tuple(piece_name(name, kind) for name in names for kind in KINDS_OF[options.scale]),
        goals={} if options.scale == "smoke" else GOALS,
        notes=tuple(notes(options)),
        figures=figures,
        spans_sources=True,
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options. Without ``--models``, they have the models of the scale."""
    parser = option_parser(__doc__, ("smoke", "cpu"))
    parser.add_argument("--models", nargs="+", type=readable_model, metavar="MODEL", help="base models")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS))
    parser.add_argument("--servers", type=Path, default=SERVERS, help="environment with vLLM and llama-cpp-python")
    options = parser.parse_args(arguments)
    options.models = options.models or list(MODELS[options.scale])
    options.kinds = options.kinds or list(KINDS_OF[options.scale])
    return options


@contextlib.contextmanager
def opened(base: str, servers: Path) -> Iterator[Matrix]:
    """Yield the matrix of a base model; leaving the block deletes its files and ends its server."""
    with tempfile.TemporaryDirectory(prefix="alto-servers-") as folder, contextlib.ExitStack() as stack:
        yield Matrix(base, Path(folder), servers, stack)


class Matrix:
    """The cells of one base model.

    Args:
        base: Folder of the base model.
        folder: Folder for adapters, exports and logs.
        servers: Environment with the servers, which may be absent.
        stack: Ends the vLLM server of adapters when it is closed.
    """

    def __init__(self, base: str, folder: Path, servers: Path, stack: contextlib.ExitStack) -> None:
        self._base, self._folder, self._stack = base, folder, stack
        self._python = servers / "bin" / "python"
        self._noise: float | None = None
        self._server: Server | None = None

    def cells(self, kind: str) -> Iterator[Cell]:
        """Yield the cells of a kind of adapter."""
        folder = self._folder / kind
        result = train(self._base, kind, folder)
        adapter = export(Path(result.adapter_dir), folder / "adapter")
        merged = export(Path(result.adapter_dir), folder / "merged", merged=True)
        assert adapter.path is not None
        reference = self._by_peft(kind, self._base, adapter.path)
        check, why = result.adapter_check, ""
        if check is None or check.status != "equal":
            why = f"ALTO's own logits differ: {check}"
        elif kind != CLASSIFIER and not compared(self._plain_answers, reference, tolerance=_LEAST_EFFECT).failures:
            why = "the adapter does not change the answers, so that the other cells prove nothing"
        yield Cell(export="adapter", server="PEFT", verdict="wrong" if why else "equal", why=why)
        yield self._tried("adapter", "vLLM", adapter, lambda: self._adapter_in_vllm(kind, adapter, reference))
        yield self._tried(
            "merged",
            "transformers",
            replace(merged, why=""),
            lambda: self._merged_in_transformers(kind, merged, reference),
        )
        yield self._tried("merged", "vLLM", merged, lambda: self._merged_in_vllm(kind, merged, reference))
        model = export(Path(result.adapter_dir), folder / "gguf", gguf="f16")
        yield self._tried("GGUF model", "llama.cpp", model, lambda: self._in_llama(model.path, None, reference))
        alone = export(Path(result.adapter_dir), folder / "gguf-adapter", gguf="adapter")
        yield self._tried(
            "GGUF adapter", "llama.cpp", alone, lambda: self._in_llama(self._base_gguf(), alone.path, reference)
        )

    # -- one cell --------------------------------------------------------------------------------------------------

    def _tried(self, form: str, server: str, exported: Exported, compare: Callable[[], Compared]) -> Cell:
        """Return the cell of an export: compared if the server takes it, refused if ALTO says that it does not."""
        if exported.path is None:
            return Cell(export=form, server=server, verdict="refused", why=exported.why)
        if server in ("vLLM", "llama.cpp") and not self._python.exists():
            return Cell(export=form, server=server, verdict="untried", why=f"{self._python} is not installed")
        try:
            found = compare()
        except RefusedError as error:
            verdict: Verdict = "refused" if exported.why else "wrong"
            return Cell(export=form, server=server, verdict=verdict, why=exported.why or f"refused: {error}")
        failures = list(found.failures)
        if exported.why and not failures:
            failures.append(f"it is served, but ALTO says: {exported.why}")
        return Cell(
            export=form,
            server=server,
            verdict="wrong" if failures else "equal",
            worst=found.worst,
            texts=found.texts,
            tolerance=found.tolerance,
            why="; ".join(failures),
        )

    def _by_peft(self, kind: str, base: str, adapter: Path | None) -> Any:
        model, tokenizer = peft_model(base, adapter)
        return scores_of(model, tokenizer) if kind == CLASSIFIER else answers_of(model, tokenizer)

    @cached_property
    def _plain_answers(self) -> Any:
        """The answers of the base model alone."""
        return self._by_peft("lora", self._base, None)

    def _merged_in_transformers(self, kind: str, merged: Exported, reference: Any) -> Compared:
        return compared(reference, self._by_peft(kind, str(merged.path), None), tolerance=FLOAT32_TOLERANCE)

    def _adapter_in_vllm(self, kind: str, adapter: Exported, reference: Any) -> Compared:
        assert adapter.path is not None
        if self._server is None:  # one server for the adapters of all kinds
            started = self._vllm(self._base, "adapters", "--enable-lora", "--max-lora-rank", "64")
            self._server = self._stack.enter_context(started)
        self._server.load(kind, adapter.path)
        return self._answered(self._server, kind, kind, reference)

    def _merged_in_vllm(self, kind: str, merged: Exported, reference: Any) -> Compared:
        runner = ("--runner", "pooling") if kind == CLASSIFIER else ()
        with self._vllm(str(merged.path), f"{kind}-merged", *runner) as server:
            return self._answered(server, kind, str(merged.path), reference)

    def _vllm(self, model: str, log: str, *options: str) -> Any:
        return serving(self._python, model, self._folder / f"{log}.log", *options)

    def _answered(self, server: Server, kind: str, name: str, reference: Any) -> Compared:
        if kind == CLASSIFIER:
            return compared(reference, server.scores(name), tolerance=_LABEL_TOLERANCE)
        has_template = bool(peft_tokenizer(self._base).chat_template)
        return compared(reference, server.answers(name, has_template=has_template), tolerance=FLOAT32_TOLERANCE)

    def _in_llama(self, file: Path | None, lora: Path | None, reference: Any) -> Compared:
        """Compare llama.cpp's answers with PEFT's. It computes in float16, so the tolerance is `_NOISE_FACTOR` times
        its difference on the plain base model."""
        if self._noise is None:
            plain = self._plain_answers
            found = compared(plain, self._llama(self._base_gguf(), None, plain), tolerance=math.inf, rounds=True)
            self._noise = found.worst
        tolerance = _NOISE_FACTOR * self._noise
        return compared(reference, self._llama(file, lora, reference), tolerance=tolerance, rounds=True)

    def _base_gguf(self) -> Path:
        """Return the GGUF file of the plain base model: the merge of an adapter whose ``B`` is zero."""
        folder = self._folder / "base"
        if not folder.exists():
            from peft import LoraConfig, get_peft_model
            from transformers import AutoModelForCausalLM

            model = AutoModelForCausalLM.from_pretrained(self._base)
            get_peft_model(model, LoraConfig(task_type="CAUSAL_LM")).save_pretrained(self._folder / "zero")
            made = export(self._folder / "zero", folder, gguf="f16")
            if made.path is None:
                raise RefusedError(made.why)
        return next(folder.glob("*.gguf"))

    def _llama(self, file: Path | None, lora: Path | None, reference: Sequence[Answer]) -> list[Answer]:
        child = Path(__file__).with_name("llama_child.py")
        command = [str(self._python), str(child), str(file), *([] if lora is None else [str(lora)])]
        done = subprocess.run(
            command, input=dump(reference), capture_output=True, text=True, timeout=_CHILD_S, check=False
        )
        if done.returncode:
            raise RefusedError(done.stderr.strip().splitlines()[-1][-300:] if done.stderr.strip() else "no answer")
        return read_answers(json.loads(done.stdout))


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The difference of a server's answers and PEFT's; see :class:`Cell`."""

    worst: float
    texts: int
    tolerance: float
    failures: list[str] = field(default_factory=list)


def compared(reference: Sequence[Any], found: Sequence[Any], *, tolerance: float, rounds: bool = False) -> Compared:
    """Compare answers, or probabilities of labels.

    Args:
        rounds: Whether the server computes in 16 bits, so that its most likely token may be another one where two are
            about as likely.
    """
    if isinstance(reference[0], list):
        worst = max(
            abs(a - b) for one, other in zip(reference, found, strict=True) for a, b in zip(one, other, strict=True)
        )
        failures = [f"probabilities differ by {worst:.1e}"] if worst > tolerance else []
        return Compared(worst=worst, texts=len(reference), tolerance=tolerance, failures=failures)
    failures, differences, texts = [], [0.0], 0
    for one, other in zip(reference, found, strict=True):
        if one.prompt_ids != other.prompt_ids:
            failures.append(f"another prompt for {one.question!r}: {other.prompt_ids[:12]}, not {one.prompt_ids[:12]}")
            continue
        texts += one.token_ids == other.token_ids
        differences += [abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=False)]
    worst = max(differences)
    if worst > tolerance:
        failures.append(f"log-probabilities differ by {worst:.1e}, allowed are {tolerance:.1e}")
    if not rounds and texts < len(reference) and not failures:
        failures.append(f"{texts} of {len(reference)} texts are equal")
    return Compared(worst=worst, texts=texts, tolerance=tolerance, failures=failures)


def peft_tokenizer(base: str) -> Any:
    """Return the tokenizer of a base model."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(base)


def _plain(cell: Cell) -> dict[str, Any]:
    numbers = {key: None if math.isnan(getattr(cell, key)) else getattr(cell, key) for key in ("worst", "tolerance")}
    found = {key: getattr(cell, key) for key in ("export", "server", "verdict", "texts")}
    why = re.sub(r"(in )?/\S*alto-servers-[^\s;]*", "", cell.why)
    return {**found, **numbers, "why": " ".join(why.split()).replace(" ;", ";")[:300]}


def figures(pieces: Mapping[str, Piece]) -> dict[str, float]:
    """Return the number of cells for each verdict."""
    verdicts = [row["verdict"] for piece in pieces.values() for row in piece.rows]
    return {f"cells_{verdict}": float(verdicts.count(verdict)) for verdict in ("equal", "refused", "wrong", "untried")}


def notes(options: argparse.Namespace) -> list[str]:
    """Return a description of the run, in sentences."""
    found = "not installed"
    python = options.servers / "bin" / "python"
    if python.exists():
        code = (
            "from importlib.metadata import version as v; "
            "print(', '.join(f'{n} {v(n)}' for n in ('vllm', 'llama-cpp-python', 'torch')))"
        )
        found = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    return [
        f"Servers: {found}.",
        "Each cell compares answers to eight questions, 16 tokens each, decoded greedily. The adapter must change "
        "these answers, compared with the base model's. vLLM and transformers compute in float32: the texts must be "
        f"equal, and log-probabilities within {FLOAT32_TOLERANCE:g}. llama.cpp computes in float16: log-probabilities "
        f"of PEFT's tokens must be within {_NOISE_FACTOR:g} times llama.cpp's difference from PEFT on the plain base "
        "model. Every server renders prompts by its own template; they must have the same tokens. The column of the "
        "adapter in PEFT shows the check that every run makes of its winner.",
        "refused: ALTO says beforehand that this cannot be served; if there is an export, the server was seen to "
        "refuse it.",
    ]
