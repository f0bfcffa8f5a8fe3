"""Divides slots and tokens by weight among tasks that share an executor; a task's unused part goes to the others.

Pure functions: the same tasks in the same order get the same parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_MOST_DIFFERENCE = 20
"""Cap on the priority difference. A larger difference would starve the lower-priority task."""


def task_weights(owners: Mapping[str, tuple[str, int]]) -> dict[str, float]:
    """Return the weight of each task: every tenant has weight 1, divided among its tasks by priority.

    A task has twice the weight of a task of the same tenant whose priority is lower by one. Differences above 20 count
    as 20.

    Args:
        owners: Tenant and priority of every task, by task name.

    Returns:
        Weights that add up to the number of tenants.
    """
    highest: dict[str, int] = {}
    for tenant, priority in owners.values():
        highest[tenant] = max(priority, highest.get(tenant, priority))
    parts = {
        task: 2.0 ** max(priority - highest[tenant], -_MOST_DIFFERENCE) for task, (tenant, priority) in owners.items()
    }
    totals = dict.fromkeys(highest, 0.0)
    for task, (tenant, _) in owners.items():
        totals[tenant] += parts[task]
    return {task: parts[task] / totals[tenant] for task, (tenant, _) in owners.items()}


def slot_shares(wanted: Mapping[str, int], weights: Mapping[str, float], num_slots: int) -> dict[str, int]:
    """Divide the slots among the tasks in proportion to their weights, without giving a task more than it wants.

    Slots that a task does not want go to the others in the same proportion. Every task that wants slots gets at least
    one while slots last, in the order of decreasing weight.

    Args:
        wanted: Slots that each task can use, by name, in the order of arrival.
        weights: Positive weights of at least these tasks.

    Returns:
        Number of slots of every task. The sum is ``num_slots``, or the number of wanted slots if that is smaller.
    """
    shares = dict.fromkeys(wanted, 0)
    # The next slot goes to the task that is furthest below its proportional share; ties go to the earliest arrival.
    for _ in range(min(num_slots, sum(wanted.values()))):
        open_tasks = [task for task in wanted if shares[task] < wanted[task]]
        without = [task for task in open_tasks if not shares[task]]
        if without:
            shares[max(without, key=lambda task: weights[task])] = 1
        else:
            shares[min(open_tasks, key=lambda task: (shares[task] + 1) / weights[task])] += 1
    return shares


@dataclass(slots=True, kw_only=True)
class ReceivedShare:
    """The tokens that one task trained in steps in which other tasks could train too.

    Attributes:
        num_steps: Steps in which the task could train.
        due_tokens: Tokens that it should have trained, by its weight among the tasks that could train.
        all_tokens: Tokens that all tasks together trained in these steps.
    """

    num_steps: int = 0
    tokens: int = 0
    due_tokens: float = 0.0
    all_tokens: int = 0


@dataclass(slots=True)
class TokenShares:
    """Chooses the tasks that train in the next step, so that their tokens become proportional to their weights.

    This is start-time fair queueing. A task's clock is its number of trained tokens divided by its weight. The task
    with the earliest clock trains. After its step, this task will have a later clock; all tasks with clocks before that
    train too. A task that arrives or returns starts with the earliest clock of the others, so its absence has no
    effect.

    Attributes:
        clocks: Clock of every task that is currently in the executor, in tokens of weight 1.
        received: Tokens that each task got while other tasks were present.
    """

    clocks: dict[str, float] = field(default_factory=dict)
    received: dict[str, ReceivedShare] = field(default_factory=dict)

    def choose(self, costs: Mapping[str, int], weights: Mapping[str, float]) -> tuple[str, ...]:
        """Return the tasks that train in the next step, in the order of ``costs``; call :meth:`trained` afterwards.

        Args:
            costs: Expected tokens of the next step of every task that could train; at least one task.
            weights: Positive weights of at least these tasks.
        """
        self.clocks = {task: clock for task, clock in self.clocks.items() if task in costs}
        earliest = min(self.clocks.values(), default=0.0)
        for task in costs:
            self.clocks[task] = max(self.clocks.get(task, earliest), earliest)
        first = min(costs, key=lambda task: self.clocks[task])
        until = self.clocks[first] + costs[first] / weights[first]
        return tuple(task for task in costs if task == first or self.clocks[task] < until)

    def trained(self, tokens: Mapping[str, int], weights: Mapping[str, float]) -> None:
        """Count a step, and advance the clocks of the tasks that trained in it.

        Args:
            tokens: Tokens that each task trained; 0 for a task that :meth:`choose` could have chosen but did not.
            weights: The weights given to :meth:`choose`.
        """
        for task, num_tokens in tokens.items():
            self.clocks[task] += num_tokens / weights[task]
        if len(tokens) < 2:
            return
        all_tokens = sum(tokens.values())
        total_weight = sum(weights[task] for task in tokens)
        for task, num_tokens in tokens.items():
            received = self.received.setdefault(task, ReceivedShare())
            received.num_steps += 1
            received.tokens += num_tokens
            received.due_tokens += all_tokens * weights[task] / total_weight
            received.all_tokens += all_tokens

    def forget(self, task: str) -> None:
        """Remove a task that has left the executor."""
        self.clocks.pop(task, None)
        self.received.pop(task, None)


def jain_index(shares: Mapping[str, float]) -> float:
    """Return Jain's fairness index of the parts: 1 if all are the same, 1/n if one of n tasks gets all tokens."""
    total, squares = sum(shares.values()), sum(share * share for share in shares.values())
    return total * total / (len(shares) * squares) if squares else 1.0
