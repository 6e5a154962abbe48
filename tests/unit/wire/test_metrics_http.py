"""GET /metrics: formats, refusals, and what a caller cannot do."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio
from octavo import metrics_http
from octavo.metrics import Histogram, Kind, Metric, MetricsError, Reading
from octavo.metrics_http import MetricsServer
from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.parser import text_string_to_metric_families

WAIT = 20.0
THINGS = Metric("octavo_test_things_total", Kind.COUNTER, "things", "Things.", ("kind",))
LEVEL = Metric("octavo_test_level", Kind.GAUGE, "", 'Level: "high"\\low.', ("where", "who"))
SECONDS = Metric(
    "octavo_test_wait_seconds", Kind.HISTOGRAM, "seconds", "Wait.", ("of",), (0.5, 2.0)
)
ODD = 'C:\\dir "quoted"\nand a second line'
EXPECTED = {
    ("octavo_test_things_total", (("kind", "a"),)): 3,
    ("octavo_test_things_total", (("kind", "b"),)): 2**53,
    ("octavo_test_level", (("where", ODD), ("who", ""))): -0.25,
    ("octavo_test_wait_seconds_bucket", (("le", "0.5"), ("of", "x"))): 2,
    ("octavo_test_wait_seconds_bucket", (("le", "2.0"), ("of", "x"))): 3,
    ("octavo_test_wait_seconds_bucket", (("le", "+Inf"), ("of", "x"))): 4,
    ("octavo_test_wait_seconds_count", (("of", "x"),)): 4,
    ("octavo_test_wait_seconds_sum", (("of", "x"),)): 11.0,
}


class _Source:
    """A few values; can be slow or broken."""

    def __init__(self) -> None:
        self.hangs = False
        self.error: Exception | None = None

    async def read(self) -> Reading:
        if self.hangs:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        reading = Reading([THINGS, LEVEL, SECONDS])
        reading.add(THINGS, 3, "a")
        reading.add(THINGS, 2**53, "b")
        reading.add(LEVEL, -0.25, ODD, "")
        waits = Histogram(SECONDS.buckets)
        for value in (0.5, 0.25, 2.0, 8.25):
            waits.observe(value)
        reading.put(SECONDS, waits, "x")
        return reading


@pytest.fixture
def source() -> _Source:
    return _Source()


@pytest_asyncio.fixture
async def server(source: _Source, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[MetricsServer]:
    monkeypatch.setattr(metrics_http, "READ_SECONDS", 0.2)
    made = MetricsServer(source, "127.0.0.1", 0)
    made.start()
    yield made
    await made.stop()


@pytest_asyncio.fixture
async def http(server: MetricsServer) -> AsyncIterator[httpx.AsyncClient]:
    url = f"http://127.0.0.1:{server.port}"
    headers = {"Accept-Encoding": "identity"}
    async with httpx.AsyncClient(
        base_url=url, timeout=WAIT, trust_env=False, headers=headers
    ) as client:
        yield client


async def test_prometheus_text_says_exactly_the_values(http: httpx.AsyncClient) -> None:
    """Without any wish the answer is the format that every scraper reads."""
    answer = await http.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    found = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
        if sample.name.startswith("octavo_")
    }
    assert found == EXPECTED
    assert "# TYPE octavo_test_things_total counter\n" in answer.text
    assert "# TYPE octavo_test_wait_seconds histogram\n" in answer.text
    assert '# HELP octavo_test_level Level: "high"\\\\low.\n' in answer.text


async def test_openmetrics_is_spoken_to_those_who_ask(http: httpx.AsyncClient) -> None:
    """A strict parser takes it, and finds the same values."""
    accept = "application/openmetrics-text; version=1.0.0,text/plain;version=0.0.4;q=0.5"
    answer = await http.get("/metrics", headers={"Accept": accept})
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    families = list(openmetrics_parser.text_string_to_metric_families(answer.text))
    found = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
        if sample.name.startswith("octavo_")
    }
    assert found == EXPECTED
    assert {f.name: f.unit for f in families if f.type == "histogram"} == {
        "octavo_test_wait_seconds": "seconds"
    }


async def test_the_process_itself_is_shown(http: httpx.AsyncClient) -> None:
    """CPU, memory and files, under the names that dashboards know."""
    text = (await http.get("/metrics")).text
    assert "\nprocess_resident_memory_bytes " in text
    assert "\nprocess_cpu_seconds_total " in text


async def test_answers_are_compressed_for_those_who_can_read_it(http: httpx.AsyncClient) -> None:
    """The same text, in fewer bytes."""
    answer = await http.get("/metrics", headers={"Accept-Encoding": "gzip"})
    assert answer.headers["content-encoding"] == "gzip"
    assert int(answer.headers["content-length"]) < len(answer.content)
    assert "octavo_test_things_total" in answer.text


@pytest.mark.parametrize("path", ["/", "/metrics/", "/metricsx", "/metrics%20"])
async def test_other_paths_lead_nowhere(http: httpx.AsyncClient, path: str) -> None:
    """The answer says where metrics are."""
    answer = await http.get(path)
    assert (answer.status_code, answer.text) == (404, "metrics are at /metrics\n")


async def test_only_reading_is_possible(http: httpx.AsyncClient) -> None:
    """HEAD is GET without the text; nothing else is known."""
    head = await http.head("/metrics?name[]=x")
    assert (head.status_code, head.content) == (200, b"")
    assert int(head.headers["content-length"]) > 100
    posted = await http.post("/metrics", content=b"x")
    assert posted.status_code == 501
    assert posted.headers["content-type"] == "text/plain; charset=utf-8"


async def test_a_loop_that_hangs_is_a_failed_scrape(
    http: httpx.AsyncClient, source: _Source
) -> None:
    """503 within the deadline, and all is well as soon as the loop is."""
    source.hangs = True
    answer = await http.get("/metrics")
    assert answer.status_code == 503
    assert answer.text == "the service gave no values within 0.2 s\n"
    source.hangs = False
    assert (await http.get("/metrics")).status_code == 200


async def test_an_error_shows_nothing_of_itself(http: httpx.AsyncClient, source: _Source) -> None:
    """It is in the log."""
    source.error = ValueError("secret detail")
    answer = await http.get("/metrics")
    assert answer.status_code == 500
    assert "secret" not in answer.text


async def test_a_taken_port_is_named_with_its_flag(server: MetricsServer, source: _Source) -> None:
    """One line says what to change."""
    with pytest.raises(MetricsError) as caught:
        MetricsServer(source, "127.0.0.1", server.port)
    assert str(caught.value) == (
        f"cannot listen on 127.0.0.1:{server.port}: the port is in use; "
        "give --metrics-listen another one"
    )


async def test_an_address_of_another_machine_is_refused(source: _Source) -> None:
    """An address from the block for documentation is nobody's."""
    with pytest.raises(MetricsError, match=r"--metrics-listen: cannot listen on 192\.0\.2\.1:0: "):
        MetricsServer(source, "192.0.2.1", 0)


async def test_few_may_be_connected_at_once(server: MetricsServer, http: httpx.AsyncClient) -> None:
    """One too many is hung up on; when others have left there is room again."""
    idle = [
        await asyncio.open_connection("127.0.0.1", server.port)
        for _ in range(metrics_http.MAX_CONNECTIONS)
    ]
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    assert await asyncio.wait_for(reader.read(), WAIT) == b""
    for _, each in [*idle, (reader, writer)]:
        each.close()
    async with asyncio.timeout(WAIT):
        while True:
            try:
                answer = await http.get("/metrics")
                break
            except httpx.TransportError:
                await asyncio.sleep(0.01)
    assert answer.status_code == 200


async def test_one_who_says_nothing_is_hung_up_on(
    source: _Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drop by drop is no way around it: a connection has an end, whatever comes."""
    monkeypatch.setattr(metrics_http, "_CONNECTION_SECONDS", 0.3)
    server = MetricsServer(source, "127.0.0.1", 0)
    server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)

    async def drip() -> None:
        writer.write(b"GET /metrics HTTP/1.1\r\n")
        while True:
            writer.write(b"X-Drop: 1\r\n")
            await asyncio.sleep(0.05)

    dripping = asyncio.create_task(drip())
    said = b""
    with contextlib.suppress(ConnectionError):  # what we still say is not read
        said = await asyncio.wait_for(reader.read(), WAIT)
    assert b"200 OK" not in said
    dripping.cancel()
    writer.close()
    await server.stop()


async def test_the_port_is_free_once_it_has_stopped(source: _Source) -> None:
    """A process that starts anew can have it."""
    server = MetricsServer(source, "127.0.0.1", 0)
    server.start()
    await server.stop()
    again = MetricsServer(source, "127.0.0.1", server.port)
    await again.stop()
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", server.port)) != 0
