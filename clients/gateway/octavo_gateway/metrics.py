"""What Prometheus reads at /metrics: requests, how long they took, and tokens."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from octavo.metrics import Kind, Metric
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

_SECONDS = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
    *(120.0, 300.0, 600.0),
)
_BY_ENDPOINT = ("endpoint",)

REQUESTS = Metric(
    "octavo_gateway_requests_total",
    Kind.COUNTER,
    "requests",
    "Requests that ended, by endpoint and HTTP status; 499: the caller hung up.",
    ("endpoint", "status"),
)
REQUEST_SECONDS = Metric(
    "octavo_gateway_request_seconds",
    Kind.HISTOGRAM,
    "seconds",
    "Time from a request's headers to the end of its answer.",
    _BY_ENDPOINT,
    _SECONDS,
)
FIRST_TOKEN = Metric(
    "octavo_gateway_first_token_seconds",
    Kind.HISTOGRAM,
    "seconds",
    "Time from a request's headers to the first token, of streams.",
    _BY_ENDPOINT,
    _SECONDS,
)
PROMPT_TOKENS = Metric(
    "octavo_gateway_prompt_tokens_total",
    Kind.COUNTER,
    "tokens",
    "Tokens of the prompts of requests that were answered in full.",
    _BY_ENDPOINT,
)
GENERATED_TOKENS = Metric(
    "octavo_gateway_generated_tokens_total",
    Kind.COUNTER,
    "tokens",
    "Tokens that were passed on, or gathered for a whole answer.",
    _BY_ENDPOINT,
)
IN_FLIGHT = Metric(
    "octavo_gateway_requests_in_flight",
    Kind.GAUGE,
    "requests",
    "Requests to generate, tokenize or describe that have not ended.",
)

METRICS = (REQUESTS, REQUEST_SECONDS, FIRST_TOKEN, PROMPT_TOKENS, GENERATED_TOKENS, IN_FLIGHT)


class Metrics:
    """The gateway's own figures; the scheduler's are the scheduler's to tell."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, num_inside: Callable[[], int]) -> None:
        # A registry of its own: the default one would be shared by all apps of a process.
        self._registry = CollectorRegistry()
        self._requests = self._counter(REQUESTS)
        self._seconds = self._histogram(REQUEST_SECONDS)
        self._first_token = self._histogram(FIRST_TOKEN)
        self._prompt_tokens = self._counter(PROMPT_TOKENS)
        self._generated_tokens = self._counter(GENERATED_TOKENS)
        inside = Gauge(IN_FLIGHT.name, IN_FLIGHT.help, registry=self._registry)
        inside.set_function(num_inside)

    def _counter(self, metric: Metric) -> Counter:
        return Counter(metric.name, metric.help, metric.labels, registry=self._registry)

    def _histogram(self, metric: Metric) -> Histogram:
        return Histogram(
            metric.name,
            metric.help,
            metric.labels,
            buckets=metric.buckets,
            registry=self._registry,
        )

    def progress(self, endpoint: str) -> Progress:
        """Begin to follow one request."""
        return Progress(self, endpoint)

    def text(self) -> bytes:
        """Everything, as Prometheus reads it."""
        return generate_latest(self._registry)

    def observe_first_token(self, endpoint: str, seconds: float) -> None:
        """Note when the first token of a stream came."""
        self._first_token.labels(endpoint).observe(seconds)

    def add_generated(self, endpoint: str, num_tokens: int) -> None:
        """Count tokens that came."""
        self._generated_tokens.labels(endpoint).inc(num_tokens)

    def add_prompt(self, endpoint: str, num_tokens: int) -> None:
        """Count tokens of prompts."""
        self._prompt_tokens.labels(endpoint).inc(num_tokens)

    def observe_end(self, endpoint: str, status: int, seconds: float) -> None:
        """Note how a request ended."""
        self._requests.labels(endpoint, str(status)).inc()
        self._seconds.labels(endpoint).observe(seconds)


class Progress:
    """One request, as metrics and its log line see it.

    Attributes:
        is_stream: whether the time to the first token means anything.
        num_tokens: generated so far.
        answer_id: of what is generated; "" where nothing is.
    """

    def __init__(self, metrics: Metrics, endpoint: str) -> None:
        self._metrics = metrics
        self._endpoint = endpoint
        self._begin = time.monotonic()
        self.is_stream = False
        self.num_tokens = 0
        self.answer_id = ""

    @property
    def seconds(self) -> float:
        """Since the request's headers."""
        return time.monotonic() - self._begin

    def received(self, num_tokens: int) -> None:
        """Take note of tokens that came."""
        if not num_tokens:
            return
        if self.is_stream and not self.num_tokens:
            self._metrics.observe_first_token(self._endpoint, self.seconds)
        self.num_tokens += num_tokens
        self._metrics.add_generated(self._endpoint, num_tokens)

    def ended(self, usage: dict[str, Any]) -> None:
        """Take note of the usage of a request that was answered in full."""
        self._metrics.add_prompt(self._endpoint, usage["prompt_tokens"])

    def close(self, status: int) -> None:
        """Take note of the end, with the status that the caller got."""
        self._metrics.observe_end(self._endpoint, status, self.seconds)
