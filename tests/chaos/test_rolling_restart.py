"""Everything is restarted under load, one after the other, and no request fails."""

from __future__ import annotations

import asyncio

import pytest
from octavo_client import AsyncClient, RetryPolicy

from tests.chaos.catalogue import make_entries, make_http_entries, record, record_http
from tests.chaos.clients import PATIENT, Crowd, use_http, use_sdk
from tests.chaos.conftest import MakeStack
from tests.chaos.ledger import Ledger
from tests.chaos.rest import until_at_rest

NUM_CLIENTS = 12


@pytest.mark.slow
async def test_a_rolling_restart_fails_no_request(make_stack: MakeStack) -> None:
    """SIGTERM to each of all services in turn; clients retry as the SDK does by default."""
    async with make_stack() as stack:
        async with AsyncClient(stack.target, retry=PATIENT) as client:
            entries = await record(client, make_entries(copies=1))
        http_entries = await record_http(stack.http_url, make_http_entries())
        crowd = Crowd(Ledger(), seed=8)
        clients = [
            asyncio.create_task(use_sdk(crowd, f"c{number}", stack.target, entries, RetryPolicy()))
            for number in range(NUM_CLIENTS)
        ]
        clients.append(asyncio.create_task(use_http(crowd, "h0", stack.http_url, http_entries)))
        exits = {}
        for service in stack.services:
            await asyncio.sleep(2.0)
            incarnation = service.incarnation
            service.terminate()
            await service.wait_next(incarnation)
            await stack.until_owned()
            exits[service.name] = service.last_exit
        await asyncio.sleep(2.0)
        await crowd.rest(100)
        crowd.end()
        await asyncio.gather(*clients)
        assert await until_at_rest(stack, 30) is None
    assert crowd.ledger.problems == []
    assert crowd.ledger.num_streams.total() > 5 * NUM_CLIENTS
    assert exits == {service.name: 0 for service in stack.services}
    assert stack.unasked_ends == []
