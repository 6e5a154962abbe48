"""What the scheduler serves, and whether it is well; asked seldom, however many ask here."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from octavo_client import AsyncClient, Health, Model, OctavoError

from octavo_gateway.tokens import Vocabulary

_MODEL_SECONDS = 30.0
_HEALTH_SECONDS = 1.0
_HEALTH_DEADLINE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Served:
    """One model, and what its tokens stand for."""

    model: Model
    vocabulary: Vocabulary

    @property
    def fingerprint(self) -> str:
        """OpenAI's system_fingerprint: equal seeds give equal tokens while it stays."""
        return f"fp_{self.model.fingerprint[:12]}"


class Scheduler:
    """Facts about the scheduler behind the gateway."""

    def __init__(self, client: AsyncClient, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._served: Served | None = None
        self._served_until = 0.0
        self._is_healthy = False
        self._healthy_until = 0.0

    async def served(self, api_key: str | None) -> Served:
        """Give the model served now; what was known of it half a minute ago counts as now.

        Raises:
            OctavoError: one of the SDK's.
        """
        if self._served is None or self._clock() >= self._served_until:
            # Several may ask at once: one must not wait, or fail, for another's key.
            model = await self._client.model(api_key=api_key)
            if self._served is None or self._served.model != model:
                self._served = Served(model, Vocabulary(self._client, model.vocab_size))
            self._served_until = self._clock() + _MODEL_SECONDS
        return self._served

    async def is_healthy(self) -> bool:
        """Whether the scheduler says that it serves; one that does not answer does not."""
        if self._clock() >= self._healthy_until:
            try:
                health = await self._client.health(timeout=_HEALTH_DEADLINE_SECONDS)
                self._is_healthy = health is Health.SERVING
            except OctavoError:
                self._is_healthy = False
            self._healthy_until = self._clock() + _HEALTH_SECONDS
        return self._is_healthy
