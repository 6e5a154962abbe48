"""Block tables: growth, sharing, copy-on-write, fences, swapping."""

from __future__ import annotations

import pytest

from scheduler_svc.core.block_manager import BlockManager
from scheduler_svc.core.request import BeamParams
from scheduler_svc.core.sequence import Sequence
from tests.support.core_builders import make_group, make_sequence


def _computed(manager: BlockManager, prompt: int | list[int], **changes: object) -> Sequence:
    """A sequence whose prompt is computed."""
    seq = make_sequence(prompt, **changes)
    manager.grow(seq, len(seq.tokens), fence=None)
    seq.num_scheduled = seq.num_computed = len(seq.tokens)
    return seq


def _fork(manager: BlockManager, parent: Sequence) -> Sequence:
    child = Sequence(parent.group, len(parent.group.sequences), list(parent.tokens))
    parent.group.sequences.append(child)
    manager.fork(parent, child)
    child.num_scheduled = child.num_computed = parent.num_scheduled
    return child


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_a_sequence_holds_the_blocks_of_its_tokens_and_no_more(num_tokens, num_blocks) -> None:
    """Blocks are allocated when a token needs them."""
    manager = BlockManager(8, block_size=4)
    seq = _computed(manager, num_tokens)
    assert len(seq.block_table) == num_blocks
    assert manager.pool.num_referenced == num_blocks


def test_decoding_takes_a_block_only_at_a_border() -> None:
    """Twelve tokens after a prompt of three take three more blocks, one in four steps."""
    manager = BlockManager(8, block_size=4)
    seq = _computed(manager, 3, max_tokens=20)
    taken = []
    for _ in range(12):
        growth = manager.grow(seq, 1, fence=None)
        taken.append(len(growth.appended))
        seq.num_scheduled += 1
    assert taken == [0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0]


def test_what_growing_needs_is_what_it_takes() -> None:
    """Of k holders of a partial block k - 1 copy it and the last one keeps it."""
    for holders in range(1, 5):
        manager = BlockManager(16, block_size=4)
        parent = _computed(manager, 6)
        group = [parent, *(_fork(manager, parent) for _ in range(holders - 1))]
        before = manager.pool.num_available
        needed = manager.num_to_grow(group)
        copies = [manager.grow(seq, 1, fence=None).copied for seq in group]
        assert needed == before - manager.pool.num_available == holders - 1
        assert [copy is not None for copy in copies] == [True] * (holders - 1) + [False]
        assert len({seq.block_table[1] for seq in group}) == holders
        assert len({seq.block_table[0] for seq in group}) == 1


def test_at_a_border_nothing_is_copied() -> None:
    """Full blocks stay shared; each holder takes a block of its own."""
    manager = BlockManager(16, block_size=4)
    parent = _computed(manager, 8)
    group = [parent, _fork(manager, parent), _fork(manager, parent)]
    assert manager.num_to_grow(group) == 3
    growths = [manager.grow(seq, 1, fence=None) for seq in group]
    assert all(growth.copied is None and len(growth.appended) == 1 for growth in growths)


def test_freeing_one_holder_keeps_the_blocks_of_the_others() -> None:
    """A fork outlives its parent."""
    manager = BlockManager(8, block_size=4)
    parent = _computed(manager, 6)
    child = _fork(manager, parent)
    table = list(child.block_table)
    manager.free(parent, fence=None)
    assert child.block_table == table
    assert manager.pool.num_referenced == 2
    manager.check([child])


def test_fenced_blocks_come_back_when_their_step_is_acknowledged() -> None:
    """And not a step earlier."""
    manager = BlockManager(2, block_size=4)
    seq = _computed(manager, 8)
    manager.free(seq, fence=3)
    assert (manager.pool.num_available, manager.num_fenced) == (0, 2)
    assert manager.num_becoming_available() == 2
    manager.settle(2)
    assert manager.pool.num_available == 0
    manager.settle(3)
    assert (manager.pool.num_available, manager.num_fenced) == (2, 0)


def test_fences_lift_in_the_order_of_steps() -> None:
    """Also if the later step's blocks were given back first."""
    manager = BlockManager(2, block_size=4)
    late, early = _computed(manager, 4), _computed(manager, 4)
    manager.free(late, fence=5)
    manager.free(early, fence=4)
    manager.settle(4)
    assert (manager.pool.num_available, manager.num_fenced) == (1, 1)


def test_a_fenced_block_that_another_table_holds_does_not_become_available() -> None:
    """Counting it would promise room that never comes."""
    manager = BlockManager(4, block_size=4)
    parent = _computed(manager, 4)
    child = _fork(manager, parent)
    manager.free(parent, fence=1)
    assert manager.num_becoming_available() == 0
    manager.settle(1)
    manager.check([child])


def test_the_source_of_a_copy_is_kept_until_the_copy_is_made() -> None:
    """The last other holder may be gone, but the step reads it still."""
    manager = BlockManager(4, block_size=4)
    parent = _computed(manager, 2)
    child = _fork(manager, parent)
    manager.free(parent, fence=6)
    assert manager.num_to_grow([child]) == 1
    growth = manager.grow(child, 1, fence=7)
    assert growth.copied is not None
    manager.settle(6)
    assert manager.pool.num_free == 2, "the source is still read by step 7"
    manager.settle(7)
    assert manager.pool.num_free == 3


@pytest.mark.parametrize(("length", "hits"), [(3, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_the_last_token_is_never_a_prefix_hit(length: int, hits: int) -> None:
    """It must be computed to draw the next one."""
    manager = BlockManager(8, block_size=4)
    tokens = list(range(12))
    seq = _computed(manager, tokens)
    manager.unnamed.append(seq)
    assert len(manager.match_prefix(make_sequence(tokens[:length]))) == hits


def test_a_block_that_is_not_full_is_no_hit() -> None:
    """Its owner writes to it still."""
    manager = BlockManager(8, block_size=4)
    seq = _computed(manager, 7)
    manager.unnamed.append(seq)
    assert len(manager.match_prefix(make_sequence([*seq.tokens, 1, 2, 3]))) == 1


def test_swapping_keeps_what_a_group_shares() -> None:
    """A block that two sequences hold takes one block of the host, and one again later."""
    manager = BlockManager(8, block_size=4, num_host_blocks=3)
    parent = _computed(manager, 6)
    child = _fork(manager, parent)
    manager.grow(child, 1, fence=None)
    group = parent.group
    assert manager.can_swap_out(group)
    device, host = manager.swap_out(group, fence=1)
    assert (len(device), len(set(host))) == (3, 3)
    assert manager.num_to_swap_in(group) == 3
    assert not parent.block_table and not child.block_table
    manager.settle(1)
    assert manager.pool.num_available == 8
    manager.swap_in(group, fence=2)
    assert parent.block_table[0] == child.block_table[0]
    assert parent.block_table[1] != child.block_table[1]
    assert manager.host_pool.num_available == 0, "read by step 2"
    manager.settle(2)
    assert manager.host_pool.num_available == 3
    manager.check([parent, child])


def test_a_group_larger_than_the_hosts_room_cannot_be_swapped() -> None:
    """Nor can any without a host pool."""
    for num_host_blocks in (0, 1):
        manager = BlockManager(8, block_size=4, num_host_blocks=num_host_blocks)
        assert not manager.can_swap_out(_computed(manager, 5).group)


@pytest.mark.parametrize(
    ("prompt", "changes", "blocks"),
    [
        (4, {"max_tokens": 1}, 1),  # the last token drawn has no K/V
        (4, {"max_tokens": 2}, 2),
        (4, {"max_tokens": 0}, 1),
        (9, {"max_tokens": 4, "best_of": 3}, 5),  # 2 shared, 1 each
        (8, {"max_tokens": 5, "best_of": 3}, 7),  # 1 shared, 2 each: the second is drawn from
        (8, {"max_tokens": 5, "n": 3, "best_of": 3, "beam": BeamParams(3)}, 5),
    ],
)
def test_the_worst_case_is_every_sample_at_full_length(prompt, changes, blocks) -> None:
    """Full blocks of the prompt are shared, all others are not."""
    group = make_group("r", prompt, **changes)
    assert BlockManager(64, block_size=4).worst_case(group) == blocks
