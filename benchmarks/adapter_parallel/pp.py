"""``pp``: the layers are split over the ranks, and a batch passes through them row by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from transformers import PreTrainedModel

from benchmarks.adapter_parallel.one_by_one import OneByOne, token_loss
from benchmarks.kernels.variants import peft_model
from benchmarks.kernels.workload import Workload

__all__ = ["Pipeline"]


class Pipeline(OneByOne):
    """GPipe with one row per micro-batch. All stages have equally many layers; the first one also has the embeddings,
    the last one the head."""

    def __init__(self, base: PreTrainedModel, workload: Workload) -> None:
        model: Any = peft_model(base, workload.ranks[0])
        rank, size = dist.get_rank(), dist.get_world_size()
        per_stage = base.config.num_hidden_layers // size
        mine = range(rank * per_stage, (rank + 1) * per_stage)
        self._stage = _Stage(model.base_model.model, mine, is_first=rank == 0, is_last=rank == size - 1)
        self._device = base.device
        self._schedules: dict[int, ScheduleGPipe] = {}
        here = set(map(id, self._stage.parameters()))
        parameters = [(name, one) for name, one in model.named_parameters() if one.requires_grad and id(one) in here]
        super().__init__(workload, parameters)

    def backward(self, rows: Sequence[int]) -> Tensor:
        ids, targets, num_trained = self.batch(rows, self._device)
        schedule = self._schedule(len(rows), num_trained)
        if self._stage.is_last:
            losses: list[Tensor] = []
            schedule.step(target=targets, losses=losses)
            return torch.stack(losses).sum().detach()
        schedule.step(*((ids,) if self._stage.is_first else ()))
        return torch.zeros((), device=self._device)

    def _schedule(self, num_rows: int, num_trained: int) -> ScheduleGPipe:
        if num_rows not in self._schedules:
            stage = PipelineStage(self._stage, dist.get_rank(), dist.get_world_size(), self._device)
            self._schedules[num_rows] = ScheduleGPipe(
                stage,
                n_microbatches=num_rows,
                loss_fn=lambda logits, targets: token_loss(logits, targets, num_trained),
                scale_grads=False,
            )
        return self._schedules[num_rows]


class _Stage(nn.Module):
    """Some consecutive layers of a causal LM: from token ids or hidden states to hidden states or logits."""

    def __init__(self, model: Any, layers: range, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        body = model.model
        self.is_first, self.is_last = is_first, is_last
        self.embeddings = body.embed_tokens if is_first else nn.Identity()
        self.rotary = body.rotary_emb
        self.layers = nn.ModuleList(body.layers[index] for index in layers)
        self.head = nn.Sequential(body.norm, model.lm_head) if is_last else nn.Identity()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.embeddings(inputs)
        position_ids = torch.arange(hidden.shape[1], device=hidden.device)[None]
        position_embeddings = self.rotary(hidden, position_ids)
        for layer in self.layers:
            # Without a mask, attention is causal.
            hidden = layer(
                hidden, attention_mask=None, position_ids=position_ids, position_embeddings=position_embeddings
            )
        logits: Tensor = self.head(hidden)
        return logits
