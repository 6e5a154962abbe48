"""One executor of several ranks: the same tokens, the same tables, and no stream lost with a rank.

Over gloo on a CPU, started by `--tensor-parallel-size` and by torchrun.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import psutil  # type: ignore[import-untyped]  # published without types
import pytest
import pytest_asyncio
from octavo.v1 import executor_pb2 as pb
from octavo.v1 import executor_pb2_grpc as rpc
from octavo_client import AsyncClient, Beam, Delta, Unavailable
from octavo_client._process import Child

from tests.chaos.model import VOCAB_SIZE, write_model
from tests.e2e.conftest import Serve
from tests.e2e.judge import Judge
from tests.e2e.test_executor_restart import free_address
from tests.e2e.waiting import until

Tokens = dict[str, dict[int, list[int]]]

SECONDS = 120.0
FLAGS = ("--dtype", "float32", "--kv-check", "--num-threads", "1")
TIGHT_POOL = {"num_blocks": 40, "num_host_blocks": 24}
GREEDY = {"temperature": 0.0}
SEEDED = {"temperature": 0.9, "top_p": 0.95, "seed": 11, "n": 3}
BEAM = {"beam": Beam(3)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two KV heads."""
    return write_model(tmp_path_factory.mktemp("tensor-parallel") / "model", num_kv_heads=2)


def prompt(number: int, length: int) -> list[int]:
    """Tokens that look like nothing."""
    return [3 + (number * 31 + place * place * 7) % (VOCAB_SIZE - 3) for place in range(length)]


async def collect(client: AsyncClient, begun: asyncio.Event | None = None) -> Tokens:
    """Send a mixed load at once; `begun` is set when a stream has some tokens."""
    found: Tokens = {}

    async def follow(name: str, tokens: list[int], **sampling: object) -> None:
        outputs = found.setdefault(name, {})
        stream = client.stream(
            tokens=tokens, max_tokens=40, ignore_eos=True, timeout=SECONDS, **sampling
        )
        async with stream as events:
            async for event in events:
                if isinstance(event, Delta):
                    outputs.setdefault(event.index, []).extend(event.token_ids)
                    if begun is not None and len(outputs[event.index]) >= 4:
                        begun.set()

    async with asyncio.TaskGroup() as group:
        for number in range(8):
            tokens = prompt(number, 10 + 17 * number)
            group.create_task(follow(f"greedy-{number}", tokens, **GREEDY))
        group.create_task(follow("seeded", prompt(20, 40), **SEEDED))
        group.create_task(follow("beam", prompt(21, 40), **BEAM))
    return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed(serve: Serve, model: Path) -> Tokens:
    """What one rank draws in a roomy pool."""
    async with serve(model=str(model), num_blocks=300, num_host_blocks=24, executor_args=FLAGS) as (
        client,
        _,
    ):
        return await collect(client)


def ranks_under(pid: int) -> dict[int, int]:
    """Process ids below a process, by rank."""
    found = {}
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error, KeyError):
            found[int(process.environ()["RANK"])] = process.pid
    return found


def is_running(pid: int) -> bool:
    """Whether a process still does anything."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


async def audit(address: str) -> pb.AuditResponse:
    """Ask an executor for its rows; with several ranks they compare theirs."""
    async with grpc.aio.insecure_channel(address) as channel:
        answer: pb.AuditResponse = await rpc.ExecutorServiceStub(channel).Audit(
            pb.AuditRequest(), timeout=SECONDS
        )
        return answer


async def test_two_ranks_draw_what_one_does(serve: Serve, model: Path, undisturbed: Tokens) -> None:
    """Greedy, seeded and beams, through forks, copies, swaps and preemptions; tables agree."""
    address = free_address()
    async with serve(
        model=str(model),
        executor_listen=address,
        executor_args=(*FLAGS, "--tensor-parallel-size", "2"),
        **TIGHT_POOL,
    ) as (client, stack):
        begun = asyncio.Event()
        streams = asyncio.create_task(collect(client, begun))
        await asyncio.wait_for(begun.wait(), SECONDS)
        rows = 0
        while not streams.done():
            rows = max(rows, len((await audit(address)).rows))
            await asyncio.sleep(0.1)
        (executor,) = (await client.snapshot()).executors
        assert rows >= 2
        assert await streams == undisturbed
        counters = executor.counters
        assert counters.num_recompute_preemptions + counters.num_swap_preemptions
        assert sorted(ranks_under(stack.pid("executor"))) == [0, 1]


@pytest.mark.slow
async def test_three_ranks_serve_the_default_model(serve: Serve, judge: Judge) -> None:
    """Its three KV heads on three ranks, tied embeddings: what plain transformers says."""
    tokens = judge.encode("The old clock in the hall")
    async with serve(
        dtype="float32", num_blocks=100, executor_args=("--tensor-parallel-size", "3")
    ) as (client, _):
        completion = await client.generate(
            tokens=tokens, max_tokens=24, temperature=0, ignore_eos=True, timeout=SECONDS
        )
    assert judge.first_difference(tokens, completion.choices[0].token_ids) is None


Start = Callable[[str, str, tuple[str, ...]], Awaitable[Child]]


@pytest_asyncio.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Start services, ended in the end: name, module, flags."""
    children: list[Child] = []

    async def start_one(name: str, module: str, flags: tuple[str, ...]) -> Child:
        child = Child(name, tmp_path / f"{name}-{len(children)}.log", echo=False)
        await child.start(module, list(flags))
        children.append(child)
        return child

    yield start_one
    for child in reversed(children):
        await child.stop(10)


@asynccontextmanager
async def connected(address: str, num_executors: int) -> AsyncIterator[AsyncClient]:
    """A client of a scheduler that has its executors."""
    async with AsyncClient(address) as client:

        async def has_all() -> bool:
            with contextlib.suppress(Unavailable):
                executors = (await client.snapshot()).executors
                return sum(executor.connected for executor in executors) == num_executors
            return False

        await until(has_all, SECONDS)
        yield client


async def test_no_stream_is_lost_with_a_rank(
    model: Path, undisturbed: Tokens, start: Start
) -> None:
    """Kill -9 of rank 1 in mid-stream: the executor ends, its streams go on at another one."""
    two, one, scheduler_at = free_address(), free_address(), free_address()
    flags = ("--model", str(model), *FLAGS, "--num-blocks", "300")
    shared = await start(
        "shared", "executor_svc", (*flags, "--listen", two, "--tensor-parallel-size", "2")
    )
    await start(
        "scheduler",
        "scheduler_svc",
        ("--model", str(model), "--listen", scheduler_at, "--executors", f"{two},{one}"),
    )
    async with connected(scheduler_at, 1) as client:
        begun = asyncio.Event()
        streams = asyncio.create_task(collect(client, begun))
        await asyncio.wait_for(begun.wait(), SECONDS)
        await start("single", "executor_svc", (*flags, "--listen", one))
        ranks = ranks_under(shared.pid)
        os.kill(ranks[1], signal.SIGKILL)
        assert await asyncio.wait_for(shared.wait(), 30) == 1
        assert await asyncio.wait_for(streams, SECONDS) == undisturbed
        assert not any(map(is_running, ranks.values()))


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["rank 0", "rank 1 stopped", "launcher"])
async def test_ranks_end_together(victim: str, model: Path, start: Start) -> None:
    """Whoever is gone, or hangs, the rest does not stay."""
    address = free_address()
    flags = ("--model", str(model), *FLAGS, "--num-blocks", "20", "--listen", address)
    child = await start(
        "executor",
        "executor_svc",
        (*flags, "--tensor-parallel-size", "2", "--step-deadline-seconds", "3"),
    )
    await until_described(address)
    ranks = ranks_under(child.pid)
    if victim == "launcher":
        child.kill()
    elif victim == "rank 0":
        os.kill(ranks[0], signal.SIGKILL)
    else:
        os.kill(ranks[1], signal.SIGSTOP)

    async def are_gone() -> bool:
        return not any(map(is_running, ranks.values()))

    if victim == "rank 1 stopped":
        # Nothing but SIGKILL reaches it, and that comes from the launcher in the end.
        assert await asyncio.wait_for(child.wait(), 60) == 1
    await until(are_gone, 30)
    assert await asyncio.wait_for(child.wait(), 10) != 0


@pytest.mark.slow
async def test_sigterm_ends_all_ranks_with_zero(model: Path, start: Start) -> None:
    """As with one rank: drained, and status 0."""
    address = free_address()
    child = await start(
        "executor",
        "executor_svc",
        ("--model", str(model), *FLAGS, "--listen", address, "--tensor-parallel-size", "2"),
    )
    await until_described(address)
    ranks = ranks_under(child.pid)
    os.kill(child.pid, signal.SIGTERM)
    assert await asyncio.wait_for(child.wait(), 30) == 0
    assert not any(map(is_running, ranks.values()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 0), (signal.SIGKILL, -9)]
)
async def test_ranks_that_still_load_end_too(
    number: signal.Signals, status: int, model: Path, start: Start
) -> None:
    """Asked for, or because the launcher is gone."""
    flags = ("--model", str(model), *FLAGS, "--listen", free_address())
    child = await start("executor", "executor_svc", (*flags, "--tensor-parallel-size", "2"))

    async def have_begun() -> bool:
        return len(ranks_under(child.pid)) == 2

    await until(have_begun, SECONDS)
    await asyncio.sleep(1)
    ranks = ranks_under(child.pid)
    os.kill(child.pid, number)
    assert await asyncio.wait_for(child.wait(), 30) == status

    async def are_gone() -> bool:
        return not any(map(is_running, ranks.values()))

    await until(are_gone, 10)


@pytest.mark.slow
async def test_torchrun_starts_the_ranks(model: Path, start: Start) -> None:
    """Its environment is all that a rank needs."""
    address = free_address()
    child = await start(
        "torchrun",
        "torch.distributed.run",
        (
            *["--nnodes", "1", "--nproc-per-node", "2", "--rdzv-backend", "c10d"],
            *["--rdzv-endpoint", "127.0.0.1:0", "-m", "executor_svc"],
            *("--model", str(model), *FLAGS, "--num-blocks", "20", "--listen", address),
        ),
    )
    described = await until_described(address)
    assert described.tensor_parallel_size == 2
    assert described.num_device_blocks == 20
    assert sorted(ranks_under(child.pid)) == [0, 1]


async def until_described(address: str) -> pb.DescribeResponse:
    """Wait until an executor is ready."""
    answers: list[pb.DescribeResponse] = []

    async def answers_now() -> bool:
        async with grpc.aio.insecure_channel(address) as channel:
            with contextlib.suppress(grpc.aio.AioRpcError):
                stub = rpc.ExecutorServiceStub(channel)
                answers.append(await stub.Describe(pb.DescribeRequest(), timeout=5))
        return bool(answers)

    await until(answers_now, SECONDS)
    return answers[0]
