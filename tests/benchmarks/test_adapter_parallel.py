"""The benchmark of adapter parallelism: two ranks at its smallest scale, a gate that fails, the cost formulas."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest

pytest.importorskip("peft", reason="the other ways need the bench extra: pip install -e '.[bench]'")

import torch
import torch.distributed as dist
from gpu_stack import ROOT, gpu_stack

from benchmarks.adapter_parallel import paper
from benchmarks.adapter_parallel import program as adapter_parallel
from benchmarks.adapter_parallel.gate import gate_failures, wrong
from benchmarks.adapter_parallel.plans import GOALS, PLANS
from benchmarks.adapter_parallel.ranks import WAYS, Cell, Findings
from benchmarks.adapter_parallel.volume import VOLUMES, Step
from benchmarks.adapter_parallel.wire import WireCounter
from benchmarks.kernels.lengths import RowLength
from benchmarks.kernels.shapes import random_model
from benchmarks.kernels.variants import JobFacts, Sequential, peft_model
from benchmarks.kernels.workload import Workload, random_rows

# PEFT 0.21 still reads names that Transformers 5.23 deprecates.
pytestmark = [
    pytest.mark.slow("benchmarks"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
]

SMOKE = PLANS["smoke"]
STEP = Step.of(SMOKE.shape, num_ranks=2, num_jobs=4, batch_size=1, length=16, adapter_rank=4, number_bytes=4)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """The result of the benchmark in a process of its own, with only what machines with a GPU have."""
    folder = tmp_path_factory.mktemp("results")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.paper", "adapter-parallel", "--out", str(folder)],
        cwd=ROOT,
        env=gpu_stack(tmp_path_factory.mktemp("stack")),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "adapter_parallel-smoke.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def base():
    return random_model(SMOKE.shape, device=torch.device("cpu"), dtype=torch.float32)


@pytest.fixture(scope="module")
def workload():
    return Workload([4, 4], random_rows([RowLength(1, 8)] * 4, SMOKE.shape["vocab_size"]), max_tokens_per_pass=64)


@pytest.fixture
def _one_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class TestTheSmallestScale:
    """Two ranks, all systems: the gate checks losses, gradients and bytes."""

    def test_is_green_and_measures_every_way(self, smoke):
        assert smoke["gate"] == "passed"
        measured = [row for row in smoke["rows"] if row["table"] == "measured"]
        assert {(row["way"], row["batch_size"]) for row in measured} == {(way, size) for way in WAYS for size in (1, 2)}
        assert all(0 < row["least"] <= row["tokens_per_s"] <= row["most"] for row in measured)

    def test_ap_gathers_the_base_and_sends_no_adapter(self, smoke):
        assert smoke["figures"]["adapter_bytes"] == 0
        for row in smoke["rows"]:
            if row.get("way") == "ap" and row["table"] == "measured":
                assert row["reduce_scatter_bytes"] == row["send_bytes"] == 0
                assert row["gather_bytes"] == VOLUMES["ap"](STEP).base

    def test_every_goal_is_a_figure(self, smoke):
        sizes = {name for name in GOALS if "_bs" in name}
        assert set(GOALS) <= set(smoke["figures"])
        for scale in ("cpu", "gpu"):
            assert sizes <= {f"over_fsdp_bs{size}" for size in PLANS[scale].batch_sizes}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_every_scale_can_be_dealt_out(plan):
    shape = plan.shape
    for dealt in (plan.num_jobs, *(shape[key] for key in shape if key.startswith("num_"))):
        assert dealt % plan.num_ranks == 0


class _Off:
    """PEFT alone, with its results changed."""

    def __init__(self, base, workload, change):
        self._alone, self._change = Sequential(base, workload), change

    def facts(self, batch_size, weights):
        return self._change(dict(enumerate(self._alone.facts(batch_size, weights))))


def _a_hundredth_off(side):
    def change(found):
        gradients = dict(found[1].gradients)
        name = min(gradients)
        gradients[name] = tuple(g * (1.01 if index == side else 1) for index, g in enumerate(gradients[name]))
        return found | {1: dataclasses.replace(found[1], gradients=gradients)}

    return change


def _without_a_module(found):
    gradients = dict(found[0].gradients)
    del gradients[min(gradients)]
    return found | {0: dataclasses.replace(found[0], gradients=gradients)}


@pytest.mark.usefixtures("_one_rank")
class TestTheGate:
    def test_is_green_for_peft_itself(self, base, workload):
        assert gate_failures({"same": _Off(base, workload, lambda found: found)}, base, workload, (1, 2)) == []

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (_a_hundredth_off(0), "job 1: gradient of A"),
            (_a_hundredth_off(1), "job 1: gradient of B"),
            (lambda found: found | {0: dataclasses.replace(found[0], loss=found[0].loss * 1.001)}, "job 0: loss"),
            (lambda found: found | {0: found[1], 1: found[0]}, "job 0: loss"),
            (_without_a_module, "job 0: no gradient of model.layers.0"),
        ],
        ids=["A", "B", "loss", "swapped", "missing"],
    )
    def test_is_red(self, base, workload, change, message):
        failures = gate_failures({"off": _Off(base, workload, change)}, base, workload, (2,))
        assert failures
        assert failures[0].startswith(f"off, batch size 2, {message}")

    def test_is_red_for_what_is_no_number(self):
        nan = JobFacts(loss=float("nan"), gradients={"m": (torch.ones(1, 1), torch.full((1, 1), float("nan")))})
        right = JobFacts(loss=1.0, gradients={"m": (torch.ones(1, 1), torch.ones(1, 1))})
        assert len(wrong({0: nan}, [right])) == 2

    def test_the_counter_refuses_a_collective_that_it_does_not_know(self):
        with WireCounter() as wire:
            dist.all_reduce(torch.zeros(3))
            with pytest.raises(KeyError, match="scatter_"):
                dist.scatter(torch.zeros(1), [torch.zeros(1)])
        assert set(wire.sent_bytes) == {"all_reduce"}


class TestTheLaws:
    def test_know_the_numbers_of_the_base_and_of_an_adapter(self, base):
        layers = base.model.layers
        assert STEP.layer_numbers == sum(one.numel() for one in layers[0].parameters())
        trained = [one for one in peft_model(base, 4).parameters() if one.requires_grad]
        assert STEP.adapter_numbers * len(layers) == sum(one.numel() for one in trained)

    def test_fill_up_the_rows_of_a_where_they_are_fewer_than_ranks(self):
        assert STEP.sharded_adapter_numbers == STEP.adapter_numbers
        wide = dataclasses.replace(STEP, num_ranks=8)
        assert wide.sharded_adapter_numbers == STEP.adapter_numbers + 4 * sum(k for k, _ in STEP.linears)

    def test_only_what_is_cut_by_tokens_grows_with_them(self):
        longer = dataclasses.replace(STEP, batch_size=8)
        grown = {way: law(longer).total / law(STEP).total for way, law in VOLUMES.items()}
        assert grown["fsdp"] == grown["ap"] == 1
        assert 1 < grown["tp"] < grown["pp"] < 8

    def test_ap_alone_gathers_once_for_all_adapters(self):
        more = dataclasses.replace(STEP, num_jobs=8)
        grown = {way: law(more) for way, law in VOLUMES.items()}
        assert grown["ap"].base == VOLUMES["ap"](STEP).base
        assert grown["fsdp"].base == 2 * VOLUMES["fsdp"](STEP).base


class TestOnPaper:
    @staticmethod
    def step(**others: int) -> Step:
        sizes = {"num_ranks": 8, "num_jobs": 64, "batch_size": 1, "length": 256, "adapter_rank": 16, "number_bytes": 2}
        return Step.of(paper.LLAMA_70B, **(sizes | others))

    def test_the_base_has_seventy_billion_numbers(self):
        step = self.step()
        assert step.layers * step.layer_numbers + 2 * step.vocabulary * step.hidden == pytest.approx(70.6e9, rel=0.01)

    def test_ap_computes_as_fast_as_the_gpus_where_it_has_tokens_enough(self):
        step = self.step(batch_size=8)
        operations = 4 * (step.layers * step.layer_numbers + step.vocabulary * step.hidden) * 64 * step.job_tokens
        assert paper.seconds("ap", step) == pytest.approx(operations / (8 * paper.FLOPS_PER_S))

    def test_ap_waits_for_the_base_where_a_gpu_has_one_short_row(self):
        step = self.step(num_ranks=64)
        assert paper.seconds("ap", step) == pytest.approx(paper.seconds("ap", self.step(num_ranks=64, length=255)))

    def test_fsdp_takes_as_long_for_one_row_as_for_a_row_a_rank(self):
        assert paper.seconds("fsdp", self.step()) == paper.seconds("fsdp", self.step(batch_size=8))

    def test_a_pipeline_runs_one_stage_at_a_time_for_one_row(self):
        one, eight = (paper.seconds("pp", self.step(num_ranks=8, batch_size=size)) for size in (1, 8))
        assert eight / one == pytest.approx(15 / 8)

    def test_between_nodes_the_slower_network_counts(self):
        # Each of 64 GPUs of 8 nodes takes in 7/8 of S / 8 through its adapter of 50 GB/s.
        step = self.step(num_ranks=64)
        num_bytes = VOLUMES["ap"](step).total / 63
        assert paper.seconds("ap", step) == pytest.approx(
            num_bytes * 7 / 8 / 8 / paper.INFINIBAND_BYTES_PER_S, rel=0.03
        )


def _findings(**seconds: tuple[float, ...]) -> Findings:
    cells = [
        Cell(
            way=way,
            batch_size=size,
            seconds=seconds[way],
            sent_bytes={"gather": VOLUMES[way](dataclasses.replace(STEP, batch_size=size)).total},
        )
        for size in SMOKE.batch_sizes
        for way in WAYS
    ]
    return Findings(num_ranks=2, cells=tuple(cells), failures=())


def test_figures_are_ratios_within_a_round():
    findings = _findings(fsdp=(4.0, 40.0, 9.0), tp=(3.0, 3.0, 3.0), pp=(2.0, 20.0, 2.0), ap=(1.0, 10.0, 1.0))
    assert adapter_parallel.wire_failures(findings, SMOKE) == []
    assert adapter_parallel.figures(findings, SMOKE) == {
        "over_fsdp_bs1": 4.0,
        "over_fsdp_bs2": 4.0,
        "over_best_other": 2.0,
        "over_fsdp_least": 4.0,
        "over_tp_least": 3.0,
        "over_pp_least": 2.0,
        "adapter_bytes": 0.0,
    }


def test_one_byte_more_than_the_law_says_is_red():
    findings = _findings(fsdp=(1.0,), tp=(1.0,), pp=(1.0,), ap=(1.0,))
    *others, last = findings.cells
    more = dataclasses.replace(last, sent_bytes={"gather": last.sent_bytes["gather"], "all_reduce": 1})
    findings = dataclasses.replace(findings, cells=(*others, more))
    (failure,) = adapter_parallel.wire_failures(findings, SMOKE)
    assert failure.startswith("ap, batch size 2:")
    assert adapter_parallel.figures(findings, SMOKE)["adapter_bytes"] == 1
