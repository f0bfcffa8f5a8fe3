"""The kernel benchmark at its smallest scale: tables, result file, and a gate that fails on wrong results."""

from __future__ import annotations

import gc
import json
import math
import subprocess
import sys
import weakref
from dataclasses import replace

import pytest

pytest.importorskip("peft", reason="the baselines need the bench extra: pip install -e '.[bench]'")

import torch
from gpu_stack import ROOT, gpu_stack
from torch.utils.flop_counter import FlopCounterMode

from alto.kernels import torch_backend
from benchmarks.baselines import grouped_mm, loop, lorafusion_torch
from benchmarks.baselines.bare_peft import bare_peft_one
from benchmarks.kernels import gate, lengths, stages, throughput
from benchmarks.kernels.flops import base_flops, lora_flops
from benchmarks.kernels.gate import Tolerance, gate_failures, reference_ops, tolerance_of
from benchmarks.kernels.measure import DeviceLimits, Turns
from benchmarks.kernels.ops import OpCase, op_failures, op_rows
from benchmarks.kernels.plans import PLANS
from benchmarks.kernels.program import main, study
from benchmarks.kernels.shapes import SHAPES, random_model
from benchmarks.kernels.stages import actions
from benchmarks.kernels.variants import VARIANTS, build, usable_variants
from benchmarks.kernels.workload import Workload, random_rows
from benchmarks.pieces import Piece, assemble, read_pieces

# PEFT 0.21 still reads names that Transformers 5.23 deprecates.
pytestmark = [
    pytest.mark.slow("benchmarks"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
]

CPU = torch.device("cpu")
SMALL = ("--scale", "smoke", "--threads", "1")
OPS = ("grouped_shrink", "grouped_expand", "grouped_backward_input", "grouped_backward_weight")


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def base():
    return random_model(SHAPES["smoke"], device=CPU, dtype=torch.float32)


@pytest.fixture(scope="module")
def workload():
    rows = random_rows(lengths.row_lengths("gpt2")[:12], SHAPES["smoke"]["vocab_size"])
    return Workload(ranks=(4, 16, 8), data=rows, max_tokens_per_pass=500)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """Exit code, result file and printed text of the smallest scale, with only what machines with a GPU have."""
    folder = tmp_path_factory.mktemp("results")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.paper", "kernels", "--out", str(folder), "--threads", "1"],
        cwd=ROOT,
        env=gpu_stack(tmp_path_factory.mktemp("stack")),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "kernels-smoke.json").read_text(encoding="utf-8")), done.stdout


@pytest.fixture
def few(monkeypatch):
    """The smallest scale with fewer variants, one batch size and one round."""
    (model,) = PLANS["smoke"].models
    models = (replace(model, batch_sizes=(1,)),)
    variants = ("frozen", "loop", "lorafusion", "ours")
    monkeypatch.setitem(PLANS, "smoke", replace(PLANS["smoke"], repeats=1, models=models, variants=variants))
    return variants


def test_the_smallest_scale_passes_its_gate_and_fills_every_table(smoke):
    result, printed = smoke
    assert (result["benchmark"], result["gate"]) == ("kernels", "passed")
    names = dict.fromkeys(row["table"] for row in result["rows"])
    tables = {name: [row for row in result["rows"] if row["table"] == name] for name in names}
    assert list(tables) == ["layer", "op", "throughput", "step"]
    for name in ("layer", "step"):
        assert {(row["variant"], row["batch_size"]) for row in tables[name]} == {
            (variant, size) for variant in PLANS["smoke"].variants for size in (1, 2)
        }
        assert all(0 < row["ms_min"] <= row["ms"] <= row["ms_max"] for row in tables[name])
    assert {(row["op"], row["shape"]) for row in tables["op"]} == {
        (op, shape) for op in OPS for shape in ("32 × 32+16+16", "32 × 32", "32 × 64+64", "64 × 32")
    }
    assert {row["timed_by"] for row in tables["op"]} == {"clock"}
    assert "smoke: ops timed by clock." in result["notes"]
    assert all(f"\n{name}\n" in f"\n{printed}" for name in tables)


def test_the_figure_of_a_baseline_is_the_median_over_batch_sizes(smoke):
    result, _ = smoke
    for name in stages.SPEEDUPS:
        ratios = [row["over_ours"] for row in result["rows"] if row["table"] == "step" and row["variant"] == name]
        assert len(ratios) == 2
        assert result["figures"][name] == pytest.approx(sum(ratios) / 2)
        assert result["figures"][f"{name}_bs2"] == ratios[1]


def test_every_goal_is_a_figure_that_its_scale_measures(smoke):
    for plan in PLANS.values():
        compared = [name for name in stages.SPEEDUPS if name in plan.variants]
        figures = {f"{name}_bs{size}" for name in compared for size in plan.models[0].batch_sizes} | set(compared)
        for model in plan.models:
            names = ("step_over_frozen", "step_over_floor", "op_share_of_floor")
            figures |= {f"{name}_{model.shape}" for name in names}
        if plan.throughput is not None:
            figures.add("samples_per_s_over_peft")
        assert set(plan.goals) <= figures
        if plan is PLANS["smoke"]:
            assert figures <= set(smoke[0]["figures"])


class TestTheGate:
    """The gate fails for each variant with wrong arithmetic, and only then."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_is_green(self, workload, dtype):
        shape = SHAPES["smoke"] | {"hidden_size": 64, "intermediate_size": 128}
        base = random_model(shape, device=CPU, dtype=dtype)
        assert set(usable_variants(CPU, dtype)) == set(VARIANTS)
        variants = {name: build(name, base, workload) for name in PLANS["smoke"].variants}
        if dtype == torch.bfloat16:
            workload = Workload(ranks=(16, 16), data=workload.data, max_tokens_per_pass=500)
            variants = {name: build(name, base, workload) for name in variants}
        assert gate_failures(variants, base, workload, 2) == []

    @pytest.mark.parametrize(
        ("variant", "module", "function"),
        [
            ("loop", loop, "add"),
            ("loop", loop, "add_backward"),
            ("lorafusion", lorafusion_torch, "fused_linear"),
            ("lorafusion", lorafusion_torch, "fused_narrow"),
            ("grouped_mm", grouped_mm, "add"),
            ("grouped_mm", grouped_mm, "add_backward"),
            *(("ours", torch_backend, op) for op in OPS),
        ],
    )
    def test_is_red_when_an_input_is_a_hundredth_off(self, base, workload, monkeypatch, variant, module, function):
        right = getattr(module, function)
        monkeypatch.setattr(module, function, lambda first, *rest, **settings: right(_off(first), *rest, **settings))
        failures = gate_failures({variant: build(variant, base, workload)}, base, workload, 1)
        assert failures
        assert all(failure.startswith(f"{variant}, job ") for failure in failures)

    @pytest.mark.parametrize("variant", ["frozen", "sequential", "loop", "lorafusion", "grouped_mm", "ours"])
    def test_is_red_when_jobs_train_each_other_s_rows(self, base, workload, monkeypatch, variant):
        broken = Workload(ranks=workload.ranks, data=workload.data, max_tokens_per_pass=500)
        broken.rows = lambda size: workload.rows(size)[::-1]
        if variant == "ours":
            monkeypatch.setattr("alto.executor.forward_plan.JobRows", lambda _, *part, **__: _swapped(*part, workload))
        built = build(variant, base, broken)
        assert gate_failures({variant: built}, base, workload, 1)

    def test_a_variant_that_is_wrong_is_not_timed_and_the_others_are(self, monkeypatch, tmp_path, capsys, few):
        monkeypatch.setattr(lorafusion_torch, "fused_linear", lambda x_TK, weight_KN, *_, **__: x_TK @ weight_KN)
        assert main([*SMALL, "--stages", "layers", "steps", "--out", str(tmp_path)]) == 1
        result = json.loads((tmp_path / "kernels-smoke.json").read_text(encoding="utf-8"))
        assert result["gate"] == "partly passed"
        assert {row["variant"] for row in result["rows"]} == set(few) - {"lorafusion"}
        assert "loop_bs1" in result["figures"]
        failures = [note for note in result["notes"] if note.startswith("Without figures, its gate failed: smoke, ")]
        assert len(failures) == len(set(failures)) > 0
        assert "lorafusion, job 0 (rank 4), loss" in failures[0]
        assert "lorafusion, job 0 (rank 4), loss" in capsys.readouterr().out

    @pytest.mark.usefixtures("few")
    def test_nothing_is_timed_where_all_are_wrong(self, monkeypatch, tmp_path):
        monkeypatch.setattr(gate, "tolerance_of", lambda *_: Tolerance(loss=-1.0, gradient=-1.0))
        monkeypatch.setattr(stages, "take_turns", lambda *_: Turns(seconds={}, failed={}))
        assert main([*SMALL, "--stages", "layers", "steps", "--out", str(tmp_path)]) == 1
        result = json.loads((tmp_path / "kernels-smoke.json").read_text(encoding="utf-8"))
        assert (result["gate"], result["figures"], result["rows"]) == ("failed", {}, [])

    @pytest.mark.usefixtures("few")
    def test_there_is_no_figure_of_ours_where_ours_is_wrong(self, monkeypatch, tmp_path):
        right = torch_backend.grouped_expand
        monkeypatch.setattr(torch_backend, "grouped_expand", lambda first, *rest: right(_off(first), *rest))
        assert main([*SMALL, "--stages", "steps", "ops", "--out", str(tmp_path)]) == 1
        result = json.loads((tmp_path / "kernels-smoke.json").read_text(encoding="utf-8"))
        assert (result["gate"], result["figures"]) == ("failed", {})
        assert {row["table"] for row in result["rows"]} == {"step"}
        assert "ours" not in {row["variant"] for row in result["rows"]}

    def test_in_bfloat16_is_as_wide_as_rounding_makes_it(self):
        """The comment at the tolerance derives it for the largest model and the shortest trained row."""
        tolerance = tolerance_of(torch.bfloat16, SHAPES["8b"]["hidden_size"])
        assert tolerance == Tolerance(loss=2e-3, gradient=3e-2)
        fewest = min(row.total - row.prompt for row in lengths.row_lengths("gpt2"))
        logit_deviation = 0.02 * SHAPES["8b"]["hidden_size"] ** 0.5
        loss = math.log(stages.CUT_VOCABULARY) + logit_deviation**2 / 2
        deviation = logit_deviation * tolerance.gradient / 2**0.5 / fewest**0.5 / loss
        assert 3 < tolerance.loss / deviation < 4
        assert tolerance_of(torch.bfloat16, 2048).loss == pytest.approx(1.414e-3, rel=1e-3)
        assert tolerance_of(torch.bfloat16, 128).loss == 1e-3
        assert tolerance_of(torch.float32, 4096) == Tolerance(loss=1e-5, gradient=1e-4)

    def test_holds_every_op(self, monkeypatch):
        case = OpCase(in_features=24, out_features=(40, 8, 8), lengths=(5, 1, 9), ranks=(2, 8, 4))
        assert op_failures(case, torch_backend, CPU, torch.float32) == []
        for name in OPS:
            right = getattr(torch_backend, name)
            with monkeypatch.context() as patch:
                patch.setattr(torch_backend, name, lambda first, *rest, right=right: right(_off(first), *rest))
                failures = op_failures(case, torch_backend, CPU, torch.float32)
                assert any(text.startswith(f"{name} at 24 × 40+8+8: ") for text in failures)


def _off(tensors):
    """Return a tensor, or each tensor of a group, changed by one percent."""
    return tensors * 1.01 if isinstance(tensors, torch.Tensor) else [tensor * 1.01 for tensor in tensors]


def _swapped(slot, rows, workload):
    from alto.data import JobRows

    return JobRows(workload.data.train, slot, workload.rows(1)[len(workload.ranks) - 1 - slot])


def test_flops_are_those_that_pytorch_counts(base, workload):
    """FLOPs of the GEMMs; PyTorch's counter knows neither this attention nor that half of it is masked."""
    frozen = build("frozen", base, workload)
    with reference_ops():  # the counter knows all its GEMMs
        ours = build("ours", base, workload)
    lengths_squared = sum(length**2 for batch in workload.batches(2, CPU) for length in batch.sequence_lengths)
    attention = 7 * base.config.num_hidden_layers * base.config.hidden_size * lengths_squared
    assert _gemm_flops(lambda: frozen.backward(2)) == base_flops(base, workload, 2) - attention
    # The adapters of the first layer's q, k and v pass no gradient to their input, which needs none.
    config, tokens = base.config, [0] * len(workload.ranks)
    for batch in workload.batches(2, CPU):
        for slot, count in zip(batch.slots, batch.job_tokens, strict=True):
            tokens[slot] += count
    sides = config.hidden_size * (config.hidden_size + 2 * config.num_key_value_heads * config.head_dim)
    spared = 2 * sides * sum(tokens) + sum(
        2 * rank * 3 * config.hidden_size * count for rank, count in zip(workload.ranks, tokens, strict=True)
    )
    expected = base_flops(base, workload, 2) - attention + lora_flops(base, workload, 2) - spared
    assert _gemm_flops(lambda: ours.backward(2)) == expected


def _gemm_flops(action):
    # The counter knows addmm, but not the in-place one.
    in_place = {torch.ops.aten.addmm_: lambda target, left, right, **_: 2 * left[0] * left[1] * right[1]}
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        action()
    counts = counter.get_flop_counts()["Global"]
    return sum(count for op, count in counts.items() if "attention" not in str(op))


def test_the_floor_of_an_op_counts_what_a_group_shares_once():
    """At one byte per second the floor is the bytes: X once for all three modules; A, B and S of each."""
    case = OpCase(in_features=24, out_features=(40, 8, 8), lengths=(5, 1, 0), ranks=(2, 4, 8))
    limits = DeviceLimits(bytes_per_s=1.0, flops_per_s=1e30)
    rows = op_rows(case, torch_backend, CPU, torch.float32, limits)
    x, ys, a, bs, s = 6 * 24, 6 * 56, 3 * (2 + 4) * 24, (2 + 4) * 56, 3 * (5 * 2 + 1 * 4)
    assert {row["op"]: row["floor_us"] / 1e6 for row in rows} == pytest.approx(
        {
            "grouped_shrink": 4 * (x + a + s),
            "grouped_expand": 4 * (s + bs + ys),
            "grouped_backward_input": 4 * (ys + bs + s + a + x),
            "grouped_backward_weight": 4 * (x + ys + 2 * s + a + bs),
        }
    )


class TestAVariantThatFails:
    """A variant that runs out of memory or raises is recorded, the others are measured, and the exit code reports
    it."""

    @pytest.mark.parametrize("fails", ["build", "step", "gate"])
    def test_leaves_the_others_alone(self, monkeypatch, tmp_path, few, fails):
        right = stages.build
        built = []

        def build_or_fail(name, base, workload):
            built.append(name)
            variant = right(name, base, workload)
            if name == "loop" and (fails == "step" or built.count("loop") == {"gate": 1, "build": 2}[fails]):
                if fails != "step":
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 46 GiB")
                variant.step = lambda batch_size: (_ for _ in ()).throw(ValueError("no such row"))
            return variant

        monkeypatch.setattr(stages, "build", build_or_fail)
        assert main([*SMALL, "--stages", "steps", "--out", str(tmp_path)]) == 1
        result = json.loads((tmp_path / "kernels-smoke.json").read_text(encoding="utf-8"))
        assert result["gate"] == "passed"
        assert {row["variant"] for row in result["rows"]} == set(few) - {"loop"}
        of_the_other = {"lorafusion", "lorafusion_bs1"}
        assert set(result["figures"]) == {"step_over_frozen_smoke", "step_over_floor_smoke"} | of_the_other
        where = {
            "build": "smoke steps: loop, before its first step: out of memory",
            "step": "smoke steps, batch size 1: loop: ValueError: no such row",
            "gate": "smoke, gate: loop: out of memory",
        }
        assert result["notes"][0] == f"Failed: {where[fails]}"

    @pytest.mark.parametrize("name", [name for name in VARIANTS if name != "compiled"])
    def test_frees_its_memory_when_it_is_dropped(self, base, workload, name):
        """Its memory is freed before Python collects cycles, because the next variant is built at once."""
        gc.collect()
        gc.disable()
        try:
            variant = build(name, base, workload)
            variant.step(1)
            held = [weakref.ref(part) for part in _parts(variant)]
            assert len(held) >= 2
            del variant
            assert [ref() for ref in held if ref() is not None] == []
        finally:
            gc.enable()


def _parts(variant):
    """Return a variant and its parts that hold weights."""
    names = ("_backbone", "_adapters", "_trainer")
    found = [variant, *(getattr(variant, name) for name in names if hasattr(variant, name))]
    found += getattr(variant, "_models", {}).values()
    if hasattr(variant, "_trainer"):
        found += [variant._trainer.bank, variant._trainer.optimizer]
    return found


@pytest.mark.usefixtures("few")
def test_a_stage_that_raises_does_not_stop_the_next(monkeypatch, tmp_path):
    monkeypatch.setattr(stages, "device_limits", lambda *_: 1 / 0)
    assert main([*SMALL, "--stages", "ops", "throughput", "--out", str(tmp_path)]) == 1
    result = json.loads((tmp_path / "kernels-smoke.json").read_text(encoding="utf-8"))
    assert result["notes"][0] == "Failed: smoke ops: ZeroDivisionError: division by zero"
    assert {"samples_per_s_over_peft"} <= set(result["figures"])
    assert [note for note in result["notes"] if note.startswith("Not measured: ")] == [
        "Not measured: smoke layers.",
        "Not measured: smoke steps.",
    ]


@pytest.mark.usefixtures("few")
def test_pieces_of_two_commands_are_one_result(tmp_path):
    for stage in ("ops", "throughput"):
        assert main([*SMALL, "--models", "smoke", "--stages", stage, "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "kernels-smoke.json").read_text(encoding="utf-8"))
    assert {"op_share_of_floor_smoke", "samples_per_s"} <= set(result["figures"])
    pieces = read_pieces(study("smoke"), tmp_path)
    assert [piece.name for piece in pieces] == ["smoke ops", "smoke throughput"]
    assert json.loads(assemble(study("smoke"), pieces).to_json()) == result


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--models", "8b"], "--models: expected some of smoke"), (["--stages", "whole"], "invalid choice: 'whole'")],
)
def test_models_and_stages_that_are_not_there_are_refused(options, message, capsys):
    with pytest.raises(SystemExit):
        main([*SMALL, *options])
    assert message in capsys.readouterr().err


def test_the_slowest_comes_last_and_every_piece_of_a_gpu_can_be_chosen():
    assert study("gpu").pieces == ("1b layers", "8b layers", "1b ops", "8b ops", "1b steps", "8b steps")


def test_both_sides_of_the_throughput_figure_train_every_row_once(base, workload, monkeypatch):
    jobs = []

    def remember(*arguments, **settings):
        jobs.append(bare_peft_one(*arguments, **settings))
        return jobs[-1]

    monkeypatch.setattr(throughput, "bare_peft_one", remember)
    throughput.measure_throughput(base, workload, repeats=1)
    assert {job.samples for job in jobs} == {len(workload.data.train)}


def test_the_rows_of_the_throughput_figure_have_177_tokens_on_average():
    plan = PLANS["cpu"].throughput
    totals = [row.total for row in lengths.row_lengths("alto-tiny") if row.total <= plan.longest]
    assert sum(totals) / len(totals) == pytest.approx(177, abs=1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_its_scale_says_what_is_missing():
    with pytest.raises(SystemExit, match="expected an NVIDIA GPU, found none"):
        main(["--scale", "gpu"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_smallest_scale_on_a_gpu():
    (model,) = PLANS["smoke"].models
    plan = replace(
        PLANS["smoke"],
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
        models=(replace(model, shape="tiny", ranks=(16, 64, 32)),),
        throughput=None,
    )
    found = []
    for name, action in actions(plan).items():
        found.append(Piece(name=name))
        action(found[-1], lambda: None)
    assert [sentence for piece in found for sentence in (*piece.failures, *piece.errors)] == []
    rows = [row for piece in found for row in piece.rows]
    assert all(row["launches"] > 0 for row in rows if row["table"] == "layer")
    assert all(row["peak_bytes"] > 0 for row in rows if row["table"] == "step")
    assert {row["timed_by"] for row in rows if row["table"] == "op"} == {"graph"}
