"""How many executors a scheduler should hold, counted by each scheduler alone.

Every one sees, through the executors, who holds which and who else is there. The share is a
function of that alone, so equal views give shares that add up; unequal ones, for a moment,
leave an executor free or make two schedulers want it, and the executor takes one of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence


def fair_share(me: str, owners: Sequence[str], schedulers: Collection[str]) -> int:
    """Count the executors that `me` should hold.

    Args:
        me: name of the scheduler that asks.
        owners: of every executor that answers: its scheduler, or "" while it is free.
        schedulers: names of those that live.
    Returns: an equal share; what is left over goes to who holds most already, so that
        nobody gives back what another one would have to get.
    """
    held = Counter(owner for owner in owners if owner)
    order = sorted({me, *schedulers, *held}, key=lambda name: (-held[name], name))
    share, left = divmod(len(owners), len(order))
    return share + (order.index(me) < left)
