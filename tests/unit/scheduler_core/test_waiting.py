"""Who is next in line."""

from __future__ import annotations

from scheduler_svc.core.sequence import GroupStatus, SequenceGroup
from scheduler_svc.core.waiting import FairQueue, OrderedQueue, WaitingQueue, fcfs_key, priority_key
from tests.support.core_builders import make_group


def _group(name: str, serial: int, key=priority_key, **changes: object) -> SequenceGroup:
    group = make_group(name, serial=serial, **changes)
    group.key = key(group)
    return group


def _names(queue: WaitingQueue) -> list[str]:
    return [queue.pop().request.request_id for _ in range(len(queue))]


def test_fcfs_goes_by_arrival_alone() -> None:
    """Priorities are ignored; equal arrivals go in the order they were added."""
    queue = OrderedQueue()
    for serial, (name, arrival, priority) in enumerate([("c", 2, 9), ("a", 1, 0), ("b", 1, 5)]):
        queue.push(_group(name, serial, fcfs_key, arrival=arrival, priority=priority))
    assert _names(queue) == ["a", "b", "c"]


def test_priority_goes_before_arrival() -> None:
    """Within a priority the earlier arrival is first."""
    queue = OrderedQueue()
    for serial, (name, arrival, priority) in enumerate([("c", 1, 0), ("b", 3, 1), ("a", 2, 1)]):
        queue.push(_group(name, serial, arrival=arrival, priority=priority))
    assert _names(queue) == ["a", "b", "c"]


def test_groups_that_left_are_skipped() -> None:
    """Length and order are those of the groups that still wait."""
    for queue in (OrderedQueue(), FairQueue()):
        groups = [_group(name, serial) for serial, name in enumerate("abc")]
        for group in groups:
            queue.push(group)
        groups[0].status = GroupStatus.FINISHED
        queue.discard(groups[0])
        assert len(queue) == 2
        assert queue.peek() is groups[1]
        assert _names(queue) == ["b", "c"]
        assert queue.peek() is None


def test_a_flood_of_cancels_does_not_grow_the_queue() -> None:
    """Memory follows the groups that wait, not those that were ever added."""
    queue = OrderedQueue()
    queue.push(_group("first", 0))
    for serial in range(1, 1000):
        group = _group("x", serial)
        queue.push(group)
        group.status = GroupStatus.FINISHED
        queue.discard(group)
    assert len(queue) == 1
    assert len(queue._heap) < 50


def _fair(*tenants: str) -> FairQueue:
    queue = FairQueue()
    for serial, tenant in enumerate(tenants):
        queue.push(_group(f"{tenant}{serial}", serial, tenant=tenant, arrival=serial))
    return queue


def test_the_tenant_with_the_least_service_is_next() -> None:
    """However many requests another has queued before."""
    queue = _fair("a", "a", "b")
    queue.charge(_group("x", 9, tenant="a"), 10, 0)
    assert queue.peek().request.tenant == "b"
    queue.charge(_group("x", 9, tenant="b"), 11, 0)
    assert queue.peek().request.tenant == "a"


def test_an_output_token_counts_as_two_prompt_tokens() -> None:
    """It costs more to serve."""
    queue = _fair("a", "b")
    queue.charge(_group("x", 9, tenant="a"), 0, 6)
    queue.charge(_group("x", 9, tenant="b"), 11, 0)
    assert queue.peek().request.tenant == "b"
    queue.charge(_group("x", 9, tenant="b"), 2, 0)
    assert queue.peek().request.tenant == "a"


def test_priority_goes_before_fairness() -> None:
    """A tenant's urgent request overtakes a poorer tenant's ordinary one."""
    queue = _fair("a")
    queue.push(_group("urgent", 9, tenant="b", priority=1))
    queue.charge(_group("x", 9, tenant="b"), 1000, 0)
    assert queue.peek().request.request_id == "urgent"


def test_an_idle_tenant_cannot_save_up_service() -> None:
    """It starts level with the least served tenant that waits."""
    queue = _fair("a", "b")
    queue.charge(_group("x", 9, tenant="a"), 1000, 0)
    queue.charge(_group("x", 9, tenant="b"), 500, 0)
    queue.push(_group("c", 5, tenant="c", arrival=5.0))
    queue.charge(_group("x", 9, tenant="c"), 1, 0)
    assert queue.peek().request.tenant == "b"


def test_an_idle_tenant_is_lifted_although_nobody_waits_just_then() -> None:
    """It starts level with the tenant that waited last."""
    queue = _fair("a")
    queue.pop()
    queue.charge(_group("x", 9, tenant="a"), 1000, 0)
    queue.push(_group("b", 5, tenant="b", arrival=5.0))
    queue.push(_group("a", 6, tenant="a", arrival=6.0))
    queue.charge(_group("x", 9, tenant="b"), 1, 0)
    assert queue.peek().request.tenant == "a", "b is a token ahead, not 999 behind"


def test_counters_of_idle_tenants_are_bounded() -> None:
    """A new tenant name with every request costs no memory for ever."""
    queue = FairQueue()
    for serial in range(3000):
        queue.push(_group("x", serial, tenant=f"t{serial}"))
        queue.pop()
    assert len(queue._counters) <= 1024
