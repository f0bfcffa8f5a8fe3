"""The check of one architecture: a training step of several jobs together, compared with PEFT training each job alone;
and an exported adapter, loaded and merged by plain PEFT."""

from __future__ import annotations

import copy
import re
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel
from transformers import logging as transformers_logging

from alto.backbone import Backbone, load_backbone, resolve_model
from alto.backbone.reading import auto_class
from alto.data import EncodedDataset, TaskData
from alto.errors import AltoError
from alto.evaluation.target import loaded_adapters
from alto.executor import BankSize, MicroBatches, TaskContext, build_trainer, initial_states
from alto.lora import (
    AdapterWeights,
    ModuleNames,
    adaptable,
    as_in_peft,
    linear_modules,
    read_saved_adapter,
    write_adapter,
)
from alto.spec import BaseModelSpec, Task
from alto.spec.job_config import ALL_LINEAR
from tools.architectures.renamed import renamed_by_peft
from tools.architectures.tiny import build_tiny
from tools.architectures.verdict import Verdict

__all__ = ["LOGIT_TOLERANCE", "LOSS_TOLERANCE", "NORM_TOLERANCE", "check"]

LOSS_TOLERANCE, NORM_TOLERANCE, LOGIT_TOLERANCE = 1e-5, 1e-4, 1e-5
ROW_LENGTHS = (13, 29, 7, 18, 21, 5, 34)
"""Row lengths. Each is at least as long as the windows of the tiny models, most are several times longer, and most are
odd."""

JOBS = (
    {"r": 4, "batch_size": 1, "seed": 1},
    {"r": 3, "batch_size": 2, "seed": 2},
    {"r": 2, "batch_size": 3, "seed": 3},
)
_ATTENTION = re.compile(r".*(attn|attention|mixer).*")
_NOT_DENSE = re.compile(r".*(expert|router|gate$|gate_proj$|indexer).*")


def check(model_type: str) -> Verdict:
    """Build, save, load, train one step, compare."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    with TemporaryDirectory() as folder:
        try:
            tokenizer = AutoTokenizer.from_pretrained(resolve_model("alto-tiny"))
            model = build_tiny(model_type, len(tokenizer))
            name = type(model).__name__
            data = _make_data(len(tokenizer))
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            alone = _OwnTraining(auto_class(model.config).from_pretrained(folder))
            alone.try_out(data.train)
        except Exception as error:
            return Verdict(model_type=model_type, status="cannot_build", reason=_where(error))
        try:
            found, exported = _train_together(Path(folder), data)
        except AltoError as error:
            return Verdict(
                model_type=model_type, model_class=name, status="refused", reason=f"{type(error).__name__}: {error}"
            )
        except Exception as error:
            return Verdict(model_type=model_type, model_class=name, status="traceback", reason=_where(error))
        try:
            expected = [alone.step(step) for step in found]
        except Exception as error:
            return Verdict(model_type=model_type, model_class=name, status="cannot_build", reason=_where(error))
        try:
            export_error, merged_error = alone.logit_errors(exported)
            renamed = alone.renamed()
        except Exception as error:
            return Verdict(model_type=model_type, model_class=name, status="wrong", reason=_where(error))
    loss_error = max(abs(f.loss - loss) / abs(loss) for f, (loss, _) in zip(found, expected, strict=True))
    gradient_error = max(_distance(f.gradients, gradients) for f, (_, gradients) in zip(found, expected, strict=True))
    is_step_exact = loss_error <= LOSS_TOLERANCE and gradient_error <= NORM_TOLERANCE
    is_export_exact = export_error <= LOGIT_TOLERANCE and merged_error <= LOGIT_TOLERANCE
    reasons = [
        *(() if is_step_exact else (f"losses {loss_error:.1e}, gradients {gradient_error:.1e} apart (relative)",)),
        *((f"PEFT looks for {', '.join(renamed[:3])} under other names",) if renamed else ()),
        *(() if is_export_exact else (f"logits of PEFT {export_error:.1e}, merged {merged_error:.1e} apart",)),
    ]
    return Verdict(
        model_type=model_type,
        model_class=name,
        status="wrong" if reasons else "exact",
        reason="; ".join(reasons),
        rows="padded" if exported.is_padded else "packed",
        loss_error=loss_error,
        gradient_error=gradient_error,
        export_error=export_error,
        merged_error=merged_error,
    )


@dataclass(frozen=True, kw_only=True)
class _Exported:
    """An adapter on disk, and the logits that ALTO computes with it.

    Attributes:
        row_1T: Token ids of a row.
        logits_TV: Logits that ALTO computes.
        is_padded: Whether ALTO computes padded rows on this model.
    """

    folder: Path
    row_1T: Tensor
    logits_TV: Tensor
    is_padded: bool


@dataclass(frozen=True, kw_only=True)
class _Step:
    """One step of one job in ALTO: its rows, adapter, loss and gradients."""

    rows: list[tuple[Tensor, Tensor]]
    settings: dict[str, Any]
    weights: dict[str, Tensor]
    loss: float
    gradients: dict[str, Tensor]


def _make_data(vocabulary: int) -> TaskData:
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(3, vocabulary, (length,), generator=generator) for length in ROW_LENGTHS]
    targets = []
    for row in rows:
        target = torch.full_like(row, -100)
        target[len(row) // 3 : -1] = row[len(row) // 3 + 1 :]
        targets.append(target)
    dataset = EncodedDataset(input_ids=tuple(rows), targets=tuple(targets))
    return TaskData(train=dataset, validation=dataset)


def _targets(model: PreTrainedModel) -> list[str] | str:
    """Return the dense linear modules of attention; if none has such a name, all dense modules; else all linear
    modules."""
    dense = [
        m for m in linear_modules(model) if not _NOT_DENSE.fullmatch(m.name) and min(m.in_features, m.out_features) >= 4
    ]
    return [m.name for m in dense if _ATTENTION.fullmatch(m.name)] or [m.name for m in dense] or ALL_LINEAR


def _parameters(model: PreTrainedModel) -> list[str]:
    """Return the parameters of stacked experts and of their routers."""
    routers = [f"{target.name}.weight" for target in adaptable(model) if target.is_router]
    return [*routers, *(target.name for target in adaptable(model) if target.num_experts)]


def _named(weights: AdapterWeights) -> dict[str, Tensor]:
    """Return the matrices in PEFT's layout, under the names ``<module>.A`` and ``<module>.B``."""
    pairs = as_in_peft(weights).items()
    return {f"{name}.{half}": matrix for name, pair in pairs for half, matrix in zip("AB", pair, strict=True)}


def _train_together(folder: Path, data: TaskData) -> tuple[list[_Step], _Exported]:
    backbone = load_backbone(BaseModelSpec(id=str(folder)))
    targets, parameters = _targets(backbone.model), _parameters(backbone.model)
    keys = {key for job in JOBS for key in job}
    task = Task(
        model=str(folder),
        dataset="unused.jsonl",
        target_modules=targets,
        target_parameters=parameters,
        lora_alpha=8,
        router_aux_loss_coef=0.0,
        num_train_epochs=1,
        max_tokens_per_pass=4000,
        search_space={"paired": {key: [job[key] for job in JOBS] for key in keys}},
    )
    context = TaskContext.of(task, backbone, data)
    jobs = initial_states(context)
    size = BankSize.of(context.jobs, backbone, num_slots=len(jobs) + 1)
    trainer = build_trainer(backbone, size, MicroBatches(4000, lambda event: None))
    generator = torch.Generator().manual_seed(5)
    for slot, job in enumerate(jobs):
        job.slot = slot
        trainer.admit(job, slot)
        weights = {
            name: (a, torch.randn(b.shape, generator=generator) * 0.1)
            for name, (a, b) in trainer.bank.read(slot).items()
        }
        trainer.bank.write(slot, AdapterWeights(weights))
    losses = trainer.backward(jobs).tolist()
    steps = []
    for job, loss in zip(jobs, losses, strict=True):
        matrices = trainer.bank.matrices(trainer.bank.grads_ZP, job.slot)
        gradients = _named(AdapterWeights({module.name: (a.clone(), b.clone()) for module, a, b in matrices}))
        rows = [(data.train.input_ids[row], data.train.targets[row]) for row in job.order.rows_of_step(0)]
        settings = {"r": job.config.r, "lora_alpha": job.config.lora_alpha, "target_modules": targets}
        settings |= {"target_parameters": parameters} if parameters else {}
        weights = _named(trainer.bank.read(job.slot))
        steps.append(_Step(rows=rows, settings=settings, weights=weights, loss=loss, gradients=gradients))
    last = jobs[-1]
    adapter = folder / "adapter"
    write_adapter(adapter, trainer.bank.read(last.slot), last.config, str(folder), ModuleNames.of(backbone.model))
    return steps, _export(adapter, backbone, data.train.input_ids[1])


@torch.no_grad()
def _export(adapter: Path, backbone: Backbone, row_T: Tensor) -> _Exported:
    positions_T = torch.arange(len(row_T))
    with (
        loaded_adapters(backbone, [read_saved_adapter(adapter)], backbone.path) as served,
        served.use(served.schedule([len(row_T)])),
    ):
        logits_TV = backbone.logits(backbone.hidden_states(row_T, positions_T, [len(row_T)]))
    return _Exported(folder=adapter, row_1T=row_T[None], logits_TV=logits_TV, is_padded=backbone.is_padded)


class _OwnTraining:
    """The unmodified model, trained by PEFT."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def try_out(self, dataset: EncodedDataset) -> None:
        """Run a forward and a backward pass of two rows."""
        inputs = _padded(list(zip(dataset.input_ids[:2], dataset.targets[:2], strict=True)))
        model = copy.deepcopy(self._model).train()
        model(**inputs, use_cache=False).loss.backward()

    def renamed(self) -> list[str]:
        """See :func:`renamed_by_peft`."""
        return renamed_by_peft(self._model)

    def step(self, step: _Step) -> tuple[float, dict[str, Tensor]]:
        """Return loss and gradients of the job alone."""
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(copy.deepcopy(self._model), LoraConfig(**step.settings, lora_dropout=0.0)).train()
        parameters = {_plain(name): value for name, value in model.named_parameters() if value.requires_grad}
        with torch.no_grad():
            for name, matrix in step.weights.items():
                parameters[name].copy_(matrix)
        loss = model(**_padded(step.rows), use_cache=False).loss
        loss.backward()
        return float(loss.detach()), {name: _gradient(value) for name, value in parameters.items()}

    @torch.no_grad()
    def logit_errors(self, exported: _Exported) -> tuple[float, float]:
        """Return the relative distance of ALTO's logits from those of the adapter that PEFT has loaded, and from those
        of the adapter that PEFT has merged."""
        from peft import PeftModel

        model = PeftModel.from_pretrained(copy.deepcopy(self._model), str(exported.folder)).eval()
        found = []
        for one in (lambda: model, model.merge_and_unload):
            logits_TV = one()(input_ids=exported.row_1T, use_cache=False).logits[0].float()
            found.append(float((exported.logits_TV - logits_TV).norm() / logits_TV.norm()))
        return found[0], found[1]


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _padded(rows: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Return rows as the collators of Hugging Face make them: padded on the right, masked, with labels that are not
    shifted yet."""
    length = max(len(ids) for ids, _ in rows)
    input_ids, attention_mask = (torch.zeros(len(rows), length, dtype=torch.long) for _ in range(2))
    labels = torch.full((len(rows), length), -100)
    for index, (ids, targets) in enumerate(rows):
        input_ids[index, : len(ids)] = ids
        attention_mask[index, : len(ids)] = 1
        labels[index, 1 : len(ids)] = targets[:-1]
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def _plain(name: str) -> str:
    name = name.removeprefix("base_model.model.")
    return name.replace(".lora_A.default.weight", ".A").replace(".lora_B.default.weight", ".B")


def _distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    apart = sum(float((found[name] - expected[name]).double().square().sum()) for name in expected)
    size = sum(float(value.double().square().sum()) for value in expected.values())
    return (apart / size) ** 0.5 if size else apart**0.5


def _where(error: BaseException) -> str:
    """Return the error in one line, with the last place in its traceback."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text} ({Path(frame.filename).name}, {frame.name})"
