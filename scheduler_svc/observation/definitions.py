"""The scheduler's metrics: names, units, labels and meanings. docs/metrics.md shows them."""

from __future__ import annotations

from octavo.metrics import Kind, Metric

_PREFIX = "octavo_scheduler_"
_BY_EXECUTOR = ("executor",)

PHASES = ("plan", "wire", "queue", "prepare", "forward", "sample")
"""Of a step, in order of time."""

_STEP_BUCKETS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 10.0, 60.0),
)
_TOKEN_BUCKETS = tuple(float(2**power) for power in range(14))
_ITL_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1),
    *(0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0),
)
_WAIT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0),
)
_CHOICE_BUCKETS = (
    *(0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0),
    *(600.0, 1800.0),
)


def _gauge(name: str, unit: str, help: str, labels: tuple[str, ...] = _BY_EXECUTOR) -> Metric:
    return Metric(_PREFIX + name, Kind.GAUGE, unit, help, labels)


def _counter(name: str, unit: str, help: str, labels: tuple[str, ...] = _BY_EXECUTOR) -> Metric:
    return Metric(_PREFIX + name, Kind.COUNTER, unit, help, labels)


def _histogram(
    name: str, unit: str, help: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()
) -> Metric:
    return Metric(_PREFIX + name, Kind.HISTOGRAM, unit, help, labels, buckets)


# -- the process -----------------------------------------------------------------------

BUILD_INFO = _gauge(
    "build_info", "", "Always 1; the label has the version of Octavo.", ("version",)
)
HEALTHY = _gauge("healthy", "", "1 while an executor takes requests and its steps advance.", ())
DRAINING = _gauge("draining", "", "1 while the scheduler shuts down and takes nothing new.", ())
STREAMS = _gauge("streams", "requests", "Requests whose streams are open.", ())

# -- requests --------------------------------------------------------------------------

CHOICES = _counter(
    "choices_total",
    "choices",
    "Choices of requests that ended, by how: stop, length, cancelled (the client left or its "
    "deadline passed), error.",
    ("reason",),
)
REFUSED = _counter(
    "refused_requests_total",
    "requests",
    "Requests that were refused or broken off, by the error that the caller got.",
    ("error",),
)
QUEUE_WAIT = _histogram(
    "queue_wait_seconds",
    "seconds",
    "Time from a request's arrival to its first admission.",
    _WAIT_BUCKETS,
)
TIME_TO_FIRST_TOKEN = _histogram(
    "time_to_first_token_seconds",
    "seconds",
    "Time from a request's arrival to its first token.",
    _WAIT_BUCKETS,
)
INTER_TOKEN = _histogram(
    "inter_token_seconds",
    "seconds",
    "Time between two tokens of a sequence, as the scheduler hands them out.",
    _ITL_BUCKETS,
)
CHOICE_SECONDS = _histogram(
    "choice_seconds",
    "seconds",
    "Time from a request's arrival to the end of a choice, by how it ended.",
    _CHOICE_BUCKETS,
    ("reason",),
)

# -- executors and what runs on them -----------------------------------------------------

EXECUTOR_CONNECTED = _gauge(
    "executor_connected", "", "1 while the executor is claimed and follows this scheduler's plans."
)
EXECUTOR_DRAINING = _gauge("executor_draining", "", "1 while the executor shuts down.")
EXECUTOR_STALLED = _gauge(
    "executor_stalled", "", "1 while a step takes longer than it may; the executor is given up."
)
LIVE_REQUESTS = _gauge("live_requests", "requests", "Requests that have not ended, in any state.")
QUEUED_REQUESTS = _gauge("queued_requests", "requests", "Requests that wait for admission.")
RUNNING_SEQUENCES = _gauge("running_sequences", "sequences", "Sequences that hold blocks.")
PREEMPTED_SEQUENCES = _gauge(
    "preempted_sequences", "sequences", "Sequences that ran and wait to come back."
)
LOAD_TOKENS = _gauge(
    "load_tokens",
    "tokens",
    "What is still to be computed for the live requests at most: prompts, less what was cached "
    "when they came, and what they may draw.",
)
STEPS_IN_FLIGHT = _gauge("steps_in_flight", "steps", "Steps planned whose results have not come.")

# -- the pool, while the executor is connected -------------------------------------------

POOL_BLOCKS = _gauge(
    "pool_blocks",
    "blocks",
    "KV blocks by state: free, cached (without owner, may be hit again), referenced. They add up "
    "to the pool.",
    ("executor", "state"),
)
POOL_SHARED_BLOCKS = _gauge(
    "pool_shared_blocks", "blocks", "Referenced blocks that have more than one reference."
)
POOL_FENCED_BLOCKS = _gauge(
    "pool_fenced_blocks", "blocks", "Referenced blocks that wait for a step in flight to end."
)
HOST_POOL_BLOCKS = _gauge(
    "host_pool_blocks",
    "blocks",
    "Blocks of host memory for swapping, by state: free, used.",
    ("executor", "state"),
)
POOL_LIVE_SLOTS = _gauge("pool_live_slots", "slots", "Slots that hold the K/V of a token.")
POOL_WASTE_SLOTS = _gauge(
    "pool_waste_slots",
    "slots",
    "Slots that are lost to fragmentation, by kind: reserved for tokens to come and external, "
    "both 0 by construction; internal, the unused end of last blocks.",
    ("executor", "kind"),
)

# -- totals of the core ------------------------------------------------------------------

STEPS = _counter("steps_total", "steps", "Steps planned.")
PROMPT_TOKENS = _counter(
    "prompt_tokens_total",
    "tokens",
    "Tokens of prompts that were computed, without prefix hits; again after a recompute.",
)
GENERATED_TOKENS = _counter("generated_tokens_total", "tokens", "Tokens sampled and kept.")
DISCARDED_TOKENS = _counter(
    "discarded_tokens_total", "tokens", "Tokens sampled after the end of their sequence was known."
)
PREFIX_QUERY_TOKENS = _counter(
    "prefix_query_tokens_total", "tokens", "Prompt tokens that were looked up in the prefix cache."
)
PREFIX_HIT_TOKENS = _counter(
    "prefix_hit_tokens_total", "tokens", "Prompt tokens that the prefix cache had."
)
PREEMPTIONS = _counter(
    "preemptions_total",
    "sequences",
    "Preemptions of sequences, by kind: recompute, swap.",
    ("executor", "kind"),
)
COPIED_BLOCKS = _counter("copied_blocks_total", "blocks", "Blocks copied on write.")
ENDED_REQUESTS = _counter(
    "ended_requests_total", "requests", "Requests that ended on the executor, in any way."
)
CANCELLED_REQUESTS = _counter(
    "cancelled_requests_total", "requests", "Requests that were cancelled before they had ended."
)
ADOPTED_REQUESTS = _counter(
    "adopted_requests_total",
    "requests",
    "Requests that came from another executor, which was lost or left.",
)
RESYNCS = _counter("resyncs_total", "claims", "Times that the executor was claimed again.")
LIVE_SLOT_STEPS = _counter(
    "live_slot_steps_total",
    "slots",
    "Sum over steps of live slots; over allocated_slot_steps it is the mean use of what is "
    "allocated.",
)
ALLOCATED_SLOT_STEPS = _counter(
    "allocated_slot_steps_total", "slots", "Sum over steps of slots in referenced blocks."
)
SAVED_BLOCK_STEPS = _counter(
    "saved_block_steps_total", "blocks", "Sum over steps of blocks that sharing saved."
)
EXECUTOR_IDLE = _counter(
    "executor_idle_seconds_total",
    "seconds",
    "Time that the executor waited for a plan between two steps although there were requests.",
)
EXECUTOR_BUSY = _counter(
    "executor_busy_seconds_total",
    "seconds",
    "Time that the executor prepared steps, computed and sampled.",
)

# -- steps ---------------------------------------------------------------------------------

STEP_SECONDS = _histogram(
    "step_seconds", "seconds", "Time from the plan of a step to its result.", _STEP_BUCKETS
)
STEP_PHASE_SECONDS = _histogram(
    "step_phase_seconds",
    "seconds",
    "Time of each phase of a step, which add up to it: plan, wire, queue, prepare, forward, "
    "sample.",
    _STEP_BUCKETS,
    ("phase",),
)
STEP_TOKENS = _histogram(
    "step_tokens", "tokens", "Tokens that a step computed, of prompts and outputs.", _TOKEN_BUCKETS
)
EXECUTOR_PHASE = _counter(
    "executor_phase_seconds_total",
    "seconds",
    "Time of steps by phase.",
    ("executor", "phase"),
)
EXECUTED_STEPS = _counter("executed_steps_total", "steps", "Steps whose results came.")
PLAN_BYTES = _counter("plan_bytes_total", "bytes", "Plans of executed steps, as sent.")

METRICS = tuple(value for value in dict(globals()).values() if isinstance(value, Metric))
