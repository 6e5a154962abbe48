"""An executor that dies of one prompt: for the tests only, put before the service's own start.

As of a fault in a kernel that one input sets off: the process is gone without a word
(POISON), or the device is lost (LOST), as soon as a step has such a sequence in it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from executor_svc import executor
from executor_svc.__main__ import main
from executor_svc.errors import DeviceLost
from executor_svc.plan import Plan

POISON = (251, 13, 252, 14, 253)
LOST = (252, 13, 253, 14, 251)

_launch = executor.Executor.launch


def _has(tokens: Sequence[int], part: tuple[int, ...]) -> bool:
    places = range(len(tokens) - len(part) + 1)
    return any(tuple(tokens[place : place + len(part)]) == part for place in places)


def _poisoned_launch(self: executor.Executor, plan: Plan) -> executor.Launched:
    for start in plan.starts:
        if _has(start.tokens, POISON):
            os.kill(os.getpid(), signal.SIGKILL)
        if _has(start.tokens, LOST):
            raise DeviceLost("the device is gone")
    return _launch(self, plan)


if __name__ == "__main__":
    executor.Executor.launch = _poisoned_launch  # type: ignore[method-assign]  # that is the poison
    sys.exit(main())
