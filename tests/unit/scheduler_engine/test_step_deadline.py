"""A step may take as long as steps take here, many times over."""

from __future__ import annotations

from scheduler_svc.step_deadline import StepDeadline


def test_first_steps_have_all_the_time() -> None:
    """They compile and warm up."""
    deadline = StepDeadline(1.0, 60.0)
    for _ in range(15):
        assert deadline.seconds(4) == 60.0
        deadline.observe(0.01, 4)
    deadline.observe(0.01, 4)
    assert deadline.seconds(4) == 1.0


def test_it_follows_the_longest_of_the_last_steps() -> None:
    """One long step keeps it up for a while, and is forgotten in the end."""
    deadline = StepDeadline(1.0, 60.0)
    for _ in range(20):
        deadline.observe(0.1, 4)
    deadline.observe(0.5, 4)
    assert deadline.seconds(4) == 10.0
    for _ in range(120):
        deadline.observe(0.1, 4)
    assert deadline.seconds(4) == 10.0
    for _ in range(256):
        deadline.observe(0.1, 4)
    assert deadline.seconds(4) == 2.0


def test_a_step_of_many_tokens_may_take_longer() -> None:
    """As long as that many steps of one token, after a time of short ones."""
    deadline = StepDeadline(1.0, 60.0)
    for _ in range(20):
        deadline.observe(0.03, 1)
    assert deadline.seconds(1) == 1.0
    assert deadline.seconds(256) == 0.03 * 256
    assert deadline.seconds(8192) == 60.0


def test_the_bounds_hold() -> None:
    """However long steps take; the upper one wins."""
    deadline = StepDeadline(5.0, 2.0)
    for _ in range(20):
        deadline.observe(9.0, 4)
    assert deadline.seconds(4) == 2.0
    slow = StepDeadline(1.0, 60.0)
    for _ in range(20):
        slow.observe(9.0, 4)
    assert slow.seconds(4) == 60.0


def test_another_process_starts_anew() -> None:
    """What was learned was about the one before."""
    deadline = StepDeadline(1.0, 60.0)
    for _ in range(20):
        deadline.observe(0.01, 4)
    deadline.forget()
    assert deadline.seconds(4) == 60.0
