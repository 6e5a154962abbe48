"""JSON bodies with something wrong in them: values of another kind, wild, missing, misplaced."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Sequence
from typing import Any

from tests.support.mutation import mutate

_WILD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**64, -(2**63), 0.5, 1e308, -1e-308, "", "x", "x" * 5000,
    "\x00", "🙂\ud83d", "1", [], [[]], [None], ["a", 1], {}, {"a": {}}, [[1, 2], [3]],
)  # fmt: skip


def broken_body(sound: Sequence[dict[str, Any]], rng: random.Random) -> bytes:
    """Break a body: two thirds in its values, the rest in its bytes."""
    body = copy.deepcopy(rng.choice(sound))
    if rng.random() < 2 / 3:
        for _ in range(rng.choice((1, 1, 2, 3))):
            _break_value(body, sound, rng)
        return json.dumps(body).encode()
    others = [json.dumps(other).encode() for other in sound]
    return mutate(json.dumps(body, ensure_ascii=rng.random() < 0.5).encode(), others, rng)


def _break_value(body: Any, sound: Sequence[dict[str, Any]], rng: random.Random) -> None:
    """Change one value, at any depth."""
    place: Any = body
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            return
        key = rng.choice(keys)
        if not isinstance(place[key], dict | list) or not place[key] or rng.random() < 0.4:
            break
        place = place[key]
    match rng.randrange(4):
        case 0:
            del place[key]
        case 1 if isinstance(place, dict):
            other = rng.choice(sound)
            name = rng.choice(list(other))
            place[name] = copy.deepcopy(other[name])
        case 2 if isinstance(place, list) and len(json.dumps(place)) < 1000:
            place *= rng.randint(2, 50)
        case _:
            place[key] = copy.deepcopy(rng.choice(_WILD))
