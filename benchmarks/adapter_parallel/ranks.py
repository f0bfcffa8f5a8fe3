"""The processes that measure, one per rank."""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import PreTrainedModel

from benchmarks.adapter_parallel.ap import AdapterParallel
from benchmarks.adapter_parallel.fsdp import FullySharded
from benchmarks.adapter_parallel.gate import gate_failures
from benchmarks.adapter_parallel.one_by_one import Way
from benchmarks.adapter_parallel.plans import Plan
from benchmarks.adapter_parallel.pp import Pipeline
from benchmarks.adapter_parallel.tp import TensorParallel
from benchmarks.adapter_parallel.wire import WireCounter
from benchmarks.kernels.lengths import RowLength
from benchmarks.kernels.measure import take_turns
from benchmarks.kernels.shapes import random_model
from benchmarks.kernels.workload import Workload, random_rows

__all__ = ["WAYS", "Cell", "Findings", "measure"]

WAYS: Mapping[str, Callable[[PreTrainedModel, Workload], Way]] = {
    "fsdp": FullySharded,
    "tp": TensorParallel,
    "pp": Pipeline,
    "ap": AdapterParallel,
}
_TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One way at one batch size.

    Attributes:
        seconds: Seconds of a step of all adapters, round by round; all ways take turns in a round.
        sent_bytes: Bytes that all ranks together send in such a step, by kind of collective.
    """

    way: str
    batch_size: int
    seconds: tuple[float, ...]
    sent_bytes: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """The findings of the ranks; there are no cells if ``failures`` say why the gate failed."""

    num_ranks: int
    cells: tuple[Cell, ...]
    failures: tuple[str, ...]


def measure(plan: Plan, ways: Mapping[str, Callable[[PreTrainedModel, Workload], Way]] = WAYS) -> Findings:
    """Check and measure in processes of their own."""
    num_ranks = min(plan.num_ranks, torch.cuda.device_count()) if plan.device == "cuda" else plan.num_ranks
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, args=(plan, num_ranks, Path(folder), ways), nprocs=num_ranks)
        found = json.loads((Path(folder) / "found.json").read_text(encoding="utf-8"))
    cells = tuple(Cell(**cell) for cell in found["cells"])
    return Findings(num_ranks=num_ranks, cells=cells, failures=tuple(found["failures"]))


def _rank(
    rank: int, plan: Plan, num_ranks: int, folder: Path, ways: Mapping[str, Callable[[PreTrainedModel, Workload], Way]]
) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(1)
    device = torch.device(plan.device, rank) if plan.device == "cuda" else torch.device("cpu")
    if plan.device == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if plan.device == "cuda" else "gloo",
        init_method=f"file://{folder / 'meet'}",
        rank=rank,
        world_size=num_ranks,
        timeout=_TIMEOUT,
    )
    failures = _gate(plan, device, ways)
    cells = [] if failures else _cells(plan, device, ways)
    if rank == 0:
        found = {"cells": [asdict(cell) for cell in cells], "failures": failures}
        (folder / "found.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def _gate(
    plan: Plan, device: torch.device, ways: Mapping[str, Callable[[PreTrainedModel, Workload], Way]]
) -> list[str]:
    shape = {**plan.shape, "num_hidden_layers": plan.num_ranks}
    base, workload = random_model(shape, device=device, dtype=torch.float32), _workload(plan)
    built = {name: build(base, workload) for name, build in ways.items()}
    return gate_failures(built, base, workload, plan.batch_sizes)


def _cells(
    plan: Plan, device: torch.device, ways: Mapping[str, Callable[[PreTrainedModel, Workload], Way]]
) -> list[Cell]:
    base, workload = random_model(plan.shape, device=device, dtype=plan.dtype), _workload(plan)
    built = {name: build(base, workload) for name, build in ways.items()}
    del base
    cells = []
    for batch_size in plan.batch_sizes:
        actions = {name: functools.partial(_step, way, batch_size, device) for name, way in built.items()}
        turns = take_turns(actions, plan.repeats, device)
        if turns.failed:
            why = "; ".join(f"{name} failed with {error}" for name, error in turns.failed.items())
            raise RuntimeError(f"expected a step of every way, found that {why}")
        for name, way in built.items():
            cells.append(
                Cell(
                    way=name,
                    batch_size=batch_size,
                    seconds=tuple(turns.seconds[name]),
                    sent_bytes=_sent_bytes(way, batch_size),
                )
            )
            if dist.get_rank() == 0:
                print(f"{name}, batch size {batch_size}: {turns.seconds[name]}", flush=True)
    return cells


def _step(way: Way, batch_size: int, device: torch.device) -> None:
    way.step(batch_size)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.all_reduce(torch.zeros(1))  # until all ranks are done


def _sent_bytes(way: Way, batch_size: int) -> dict[str, float]:
    with WireCounter() as wire:
        way.step(batch_size)
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, wire.sent_bytes)
    kinds = sorted(set().union(*of_ranks))
    return {kind: sum(sent.get(kind, 0.0) for sent in of_ranks) for kind in kinds}


def _workload(plan: Plan) -> Workload:
    rows = random_rows([RowLength(1, plan.length)] * (2 * max(plan.batch_sizes)), plan.shape["vocab_size"])
    most = plan.num_jobs * max(plan.batch_sizes) * plan.length
    return Workload([plan.adapter_rank] * plan.num_jobs, rows, max_tokens_per_pass=most)
