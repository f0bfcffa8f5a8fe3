"""How tasks that share an executor divide its slots and its tokens: by weight, and what one leaves, others get.

Pure: the same tasks in the same order get the same shares.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["ReceivedShare", "TokenShares", "jain_index", "slot_shares", "task_weights"]


_MOST_DIFFERENCE = 20
"""Of priorities that count; beyond it, a task would wait for ever."""


def task_weights(owners: Mapping[str, tuple[str, int]]) -> dict[str, float]:
    """The weight of each task: all tenants have the same, divided among the tasks of each by priority.

    A task has twice the weight of one of the same tenant whose priority is lower by one; the difference counts up to
    20.

    Args:
        owners: Tenant and priority of every task, by its name.

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
    """Slots of each task: in proportion to its weight, but no more than it wants; what is left goes to the others in
    the same proportion.

    Every task that wants slots gets one as long as there are any, the heaviest first.

    Args:
        wanted: Slots that each task can use, by name, in the order of their arrival.
        weights: Positive; of at least these tasks.
        num_slots: To be divided.

    Returns:
        A number for every task; together at most ``num_slots``, and exactly that many where so many are wanted.
    """
    shares = dict.fromkeys(wanted, 0)
    # The next slot goes to the task that has least of what is due to it; equal ones in the order of arrival.
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
    """What one task got of the tokens that were trained while others could train too.

    Attributes:
        num_steps: Steps that it could have trained in.
        tokens: Tokens that it trained in them.
        due_tokens: Tokens that were due to it, by its weight among those that could train.
        all_tokens: Tokens that all trained in them.
    """

    num_steps: int = 0
    tokens: int = 0
    due_tokens: float = 0.0
    all_tokens: int = 0


@dataclass(slots=True)
class TokenShares:
    """Which tasks train in the next step, so that over many steps each trains tokens in proportion to its weight.

    Start-time fair queueing: a task's clock is what it has trained, in tokens, over its weight. The task with the
    earliest clock trains, and with it every task whose clock is earlier than that one would be after its own step. A
    task that comes, or comes back, starts at the earliest clock of the others, so that it neither owes nor is owed
    anything for the time that it was not there.

    Attributes:
        clocks: Of every task that is there, in tokens of weight 1.
        received: What each task got while there were others.
    """

    clocks: dict[str, float] = field(default_factory=dict)
    received: dict[str, ReceivedShare] = field(default_factory=dict)

    def choose(self, costs: Mapping[str, int], weights: Mapping[str, float]) -> tuple[str, ...]:
        """The tasks that train in the next step, in the order of ``costs``; :meth:`trained` is next.

        Args:
            costs: Tokens of the next step of every task that could train, at least one task, in expectation.
            weights: Positive; of at least these tasks.
        """
        self.clocks = {task: clock for task, clock in self.clocks.items() if task in costs}
        earliest = min(self.clocks.values(), default=0.0)
        for task in costs:
            self.clocks[task] = max(self.clocks.get(task, earliest), earliest)
        first = min(costs, key=lambda task: self.clocks[task])
        until = self.clocks[first] + costs[first] / weights[first]
        return tuple(task for task in costs if task == first or self.clocks[task] < until)

    def trained(self, tokens: Mapping[str, int], weights: Mapping[str, float]) -> None:
        """Count a step, and advance the clocks of the tasks that have trained in it.

        Args:
            tokens: What each task has trained, of those that :meth:`choose` has chosen from; 0 of the others.
            weights: As :meth:`choose` takes them.
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
        """Forget a task that has left."""
        self.clocks.pop(task, None)
        self.received.pop(task, None)


def jain_index(shares: Mapping[str, float]) -> float:
    """How fair shares are: 1 where all are equal, 1/n where one of n tasks has everything."""
    total, squares = sum(shares.values()), sum(share * share for share in shares.values())
    return total * total / (len(shares) * squares) if squares else 1.0
