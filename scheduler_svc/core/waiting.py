"""The bounded queue of groups that never ran, in the order of a policy.

A policy is two small things: the `key` that orders groups (the smaller first; running
groups are preempted from the largest key down), and, for fairness between tenants,
counters of the work that each tenant has had.

    fcfs      by arrival; priorities are ignored
    priority  by priority, then arrival
    fair      by priority, then the tenant with the least service so far (a virtual
              token counter: prompt tokens and twice the output tokens), then arrival

Source of the fair policy: Sheng et al., "Fairness in Serving Large Language Models",
OSDI 2024: a tenant that was idle is lifted to the least counter of the active ones, so
that it cannot save up service. If none is, the level is that of who waited last.
"""

from __future__ import annotations

import heapq
from typing import Protocol

from scheduler_svc.core.sequence import GroupStatus, SequenceGroup

Key = tuple[float, float, int]

OUTPUT_TOKEN_WEIGHT = 2.0


def fcfs_key(group: SequenceGroup) -> Key:
    """Order by arrival alone."""
    return (0, group.request.arrival, group.serial)


def priority_key(group: SequenceGroup) -> Key:
    """Order by priority, then arrival."""
    return (-group.request.priority, group.request.arrival, group.serial)


class WaitingQueue(Protocol):
    """Groups that wait for their first admission."""

    def __len__(self) -> int:
        """Groups that wait."""

    def push(self, group: SequenceGroup) -> None:
        """Add a group."""

    def peek(self) -> SequenceGroup | None:
        """Return the group that is next."""

    def pop(self) -> SequenceGroup:
        """Take the group that `peek` returns."""

    def discard(self, group: SequenceGroup) -> None:
        """Take a group out whose status is no longer WAITING."""

    def clear(self) -> None:
        """Take all groups out; what tenants had of service stays known."""

    def charge(self, group: SequenceGroup, num_prompt: int, num_output: int) -> None:
        """Count work done for the group's tenant, in tokens."""


class OrderedQueue:
    """A heap by key. Groups that left early are skipped when they surface."""

    def __init__(self) -> None:
        """Start empty."""
        self._heap: list[tuple[Key, SequenceGroup]] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, group: SequenceGroup) -> None:
        """Add a group."""
        heapq.heappush(self._heap, (group.key, group))
        self._size += 1

    def peek(self) -> SequenceGroup | None:
        """Return the group that is next."""
        while self._heap and self._heap[0][1].status is not GroupStatus.WAITING:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> SequenceGroup:
        """Take the group that `peek` returns."""
        group = self.peek()
        assert group is not None, "pop from an empty queue"
        heapq.heappop(self._heap)
        self._size -= 1
        return group

    def discard(self, group: SequenceGroup) -> None:
        """Take a group out whose status is no longer WAITING."""
        del group  # its status tells
        self._size -= 1
        # Dead entries stay in the heap until they surface, but never outnumber the
        # living: otherwise a flood of cancels would grow it without bound.
        if len(self._heap) > 2 * self._size + 16:
            self._heap = [e for e in self._heap if e[1].status is GroupStatus.WAITING]
            heapq.heapify(self._heap)

    def clear(self) -> None:
        """Take all groups out."""
        self._heap.clear()
        self._size = 0

    def charge(self, group: SequenceGroup, num_prompt: int, num_output: int) -> None:
        """Count nothing: this order looks at no one's share."""


class FairQueue:
    """One ordered queue per tenant; the tenant with the least service goes first."""

    def __init__(self) -> None:
        """Start empty."""
        self._queues: dict[str, OrderedQueue] = {}
        self._counters: dict[str, float] = {}
        self._last_tenant = ""
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, group: SequenceGroup) -> None:
        """Add a group; a tenant that was idle starts level with the least active one."""
        tenant = group.request.tenant
        queue = self._queues.get(tenant)
        if queue is None or not len(queue):
            active = [self._counters[t] for t, q in self._queues.items() if len(q)]
            floor = min(active, default=self._counters.get(self._last_tenant, 0.0))
            self._counters[tenant] = max(self._counters.get(tenant, 0.0), floor)
            queue = self._queues.setdefault(tenant, OrderedQueue())
        queue.push(group)
        self._size += 1

    def peek(self) -> SequenceGroup | None:
        """Return the group that is next: priority, then least served tenant."""
        heads = [
            (g.key[0], self._counters[t], g.key, g)
            for t, q in self._queues.items()
            if (g := q.peek()) is not None
        ]
        return min(heads)[3] if heads else None

    def pop(self) -> SequenceGroup:
        """Take the group that `peek` returns."""
        group = self.peek()
        assert group is not None, "pop from an empty queue"
        self._queues[group.request.tenant].pop()
        self._size -= 1
        self._forget_idle(group.request.tenant)
        return group

    def discard(self, group: SequenceGroup) -> None:
        """Take a group out whose status is no longer WAITING."""
        self._queues[group.request.tenant].discard(group)
        self._size -= 1
        self._forget_idle(group.request.tenant)

    def clear(self) -> None:
        """Take all groups out; what tenants had of service stays known."""
        self._queues.clear()
        self._size = 0

    def charge(self, group: SequenceGroup, num_prompt: int, num_output: int) -> None:
        """Count work done for the group's tenant, in tokens."""
        tenant = group.request.tenant
        if tenant in self._counters:
            self._counters[tenant] += num_prompt + OUTPUT_TOKEN_WEIGHT * num_output

    def _forget_idle(self, tenant: str) -> None:
        """Keep counters of idle tenants only up to a bound, the least served first out."""
        if not len(self._queues[tenant]):
            del self._queues[tenant]
            self._last_tenant = tenant
        while len(self._counters) > max(1024, 2 * len(self._queues)):
            idle = (t for t in self._counters if t not in self._queues and t != tenant)
            del self._counters[min(idle, key=self._counters.__getitem__)]
