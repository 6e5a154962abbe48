"""The C++ client against the running services: `make clients-test`.

pytest does not find this file by itself, since it needs gRPC for C++, which `make test`
must do without.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from octavo_client import AsyncClient

from scheduler_svc.security.key_file import add_key
from tests.e2e.conftest import Serve, Served
from tests.e2e.prompts import prompts
from tests.integration.secured_rig import serving
from tests.support.certificates import Authority
from tests.support.delay_proxy import DelayProxy

pytestmark = pytest.mark.asyncio(loop_scope="module")

_ROOT = Path(__file__).resolve().parents[2]
_BUILD = _ROOT / "clients" / "cpp" / "build"
_BUILD_SECONDS = 900
_RUN_SECONDS = 120
_SEED = 2**64 - 59


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """The library, its example and the driver."""
    script = _ROOT / "scripts" / "build_cpp_client.sh"
    done = subprocess.run(
        ["bash", script, "--tests"],
        capture_output=True,
        text=True,
        timeout=_BUILD_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(serve: Serve) -> AsyncIterator[Served]:
    """One pair of services for all tests of this file."""
    async with serve(dtype="float32", num_blocks=400) as pair:
        yield pair


async def run(program: str, *arguments: str, **environment: str) -> tuple[int, str, str]:
    """Run a program to its end; return its exit status and what it printed."""
    process = await asyncio.create_subprocess_exec(
        _BUILD / program,
        *arguments,
        env={**os.environ, **environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await asyncio.wait_for(process.communicate(), _RUN_SECONDS)
    assert process.returncode is not None
    return process.returncode, output.decode(), errors.decode()


async def drive(*arguments: str, **environment: str) -> dict[str, list[str]]:
    """Let the driver do one thing; return its lines by their first word."""
    status, output, errors = await run("octavo-driver", *arguments, **environment)
    assert status == 0, output + errors
    lines: dict[str, list[str]] = defaultdict(list)
    for line in output.splitlines():
        name, _, rest = line.partition(" ")
        lines[name].append(rest)
    return lines


def quoted(text: str) -> str:
    """A text as the driver prints it."""
    return text.replace("\\", "\\\\").replace("\n", "\\n")


async def greedy_text(client: AsyncClient, prompt: str, max_tokens: int = 48) -> str:
    """What the Python SDK gives."""
    answer = await client.generate(
        prompt, temperature=0, max_tokens=max_tokens, ignore_eos=True, timeout=60
    )
    return answer.text


async def until_free(client: AsyncClient) -> None:
    """Wait until no block is referenced."""
    for _ in range(500):
        executor = (await client.snapshot()).executors[0]
        if executor.pool.num_referenced == 0 and executor.num_running == 0:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"blocks are still held: {executor.pool}")


@pytest.mark.parametrize("prompt", prompts(12)[::4])
async def test_a_greedy_stream_gives_the_text_of_the_python_sdk(
    served: Served, prompt: str
) -> None:
    """In many deltas, between one Started, one Finished and one Usage."""
    client, stack = served
    got = await drive(stack.target, "stream", prompt, "48")
    assert got["text"] == [quoted(await greedy_text(client, prompt))]
    assert int(got["deltas"][0]) > 10
    assert got["order"] == ["134"]  # started, finished, usage: their field numbers


async def test_two_choices_with_a_seed_of_64_bits(served: Served) -> None:
    """They draw the tokens of the Python SDK."""
    client, stack = served
    got = await drive(stack.target, "seeded", "The old lighthouse", "16", str(_SEED))
    whole = await client.generate(
        "The old lighthouse",
        n=2,
        seed=_SEED,
        temperature=0.9,
        top_p=0.95,
        max_tokens=16,
        ignore_eos=True,
        timeout=60,
    )
    expected = [" ".join(map(str, choice.token_ids)) for choice in whole.choices]
    assert got["choice"] == expected
    assert expected[0] != expected[1]
    assert got["seed"] == [str(_SEED)]
    assert got["completion_tokens"] == ["32"]


async def test_a_stop_string_is_named(served: Served) -> None:
    """The text ends before it."""
    client, stack = served
    text = await greedy_text(client, "1, 2, 3, 4,")
    stop = text[7:11]
    got = await drive(stack.target, "stop", "1, 2, 3, 4,", stop)
    assert got == {"text": [quoted(text[: text.index(stop)])], "stop": [quoted(stop)]}


async def test_unary_calls(served: Served) -> None:
    """Tokens, their text and the model are those of the Python SDK."""
    client, stack = served
    text = "Cafe\u0301, 日本\n🙂"
    got = await drive(stack.target, "unary", text)
    assert got["tokens"] == [" ".join(map(str, await client.tokenize(text)))]
    assert got["text"] == [quoted(text)]
    model = await client.model()
    got = await drive(stack.target, "model")
    assert got == {"model": [model.model], "vocab_size": [str(model.vocab_size)]}


async def test_a_field_out_of_bounds_is_named(served: Served) -> None:
    """The details of google.rpc arrive: the field, its bound, the constant for programs."""
    _, stack = served
    got = await drive(stack.target, "temperature", "-1")
    assert got["error"] == [str(grpc.StatusCode.INVALID_ARGUMENT.value[0])]
    assert got["field"] == ["sampling.temperature"]
    assert "between 0 and 100" in got["description"][0]
    assert got["reason"] == ["INVALID_FIELD"]


@pytest.mark.parametrize(
    ("way", "end"), [("return", "left"), ("throw", "the reader broke"), ("cancel", "cancelled")]
)
async def test_a_stream_that_is_left_frees_its_blocks(served: Served, way: str, end: str) -> None:
    """While the client stays: the call is cancelled, not only its connection."""
    client, stack = served
    process = await asyncio.create_subprocess_exec(
        _BUILD / "octavo-driver",
        stack.target,
        "leave",
        way,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), _RUN_SECONDS)
        assert line.decode().rstrip() == f"end {end}"
        await until_free(client)
        assert process.returncode is None
        await asyncio.wait_for(process.communicate(b"\n"), _RUN_SECONDS)
        assert process.returncode == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_deadline_ends_a_stream(served: Served) -> None:
    """In the client's own words; the blocks come back."""
    client, stack = served
    got = await drive(stack.target, "deadline", "300")
    assert got["error"] == [str(grpc.StatusCode.DEADLINE_EXCEEDED.value[0])]
    assert got["message"] == ["the deadline of 300 ms passed"]
    await until_free(client)


async def test_a_stream_that_is_cut_twice_goes_on(served: Served) -> None:
    """No token is lost, repeated or changed."""
    client, stack = served
    arguments = ("seeded", "Once upon a time", "120", str(_SEED))
    whole = await drive(stack.target, *arguments)

    async def counters() -> tuple[int, int]:
        counted = (await client.snapshot()).executors[0].counters
        return counted.num_generated_tokens, counted.num_cancelled

    generated, cancelled = await counters()
    async with DelayProxy(stack.target, delay_seconds=0) as proxy:
        driving = asyncio.create_task(drive(proxy.address, *arguments))
        for num_tokens in (40, 120):
            while (await counters())[0] < generated + num_tokens and not driving.done():
                await asyncio.sleep(0.005)
            proxy.cut()
        assert await driving == whole
    await until_free(client)
    assert (await counters())[1] == cancelled + 2


async def test_nothing_listening_is_unavailable() -> None:
    """The message names the address."""
    got = await drive("127.0.0.1:1", "unary", "a")
    assert got["error"] == [str(grpc.StatusCode.UNAVAILABLE.value[0])]
    assert "127.0.0.1:1" in got["message"][0]


@pytest.mark.parametrize(
    ("target", "key", "field"),
    [
        ("localhost", "", "target"),
        ("http://localhost:1", "", "target"),
        ("localhost:65536", "", "target"),
        ("localhost:1", "two words", "api_key"),
        ("octavo.example:1", "octavo-key", "api_key"),
    ],
)
async def test_bad_options_are_named(target: str, key: str, field: str) -> None:
    """Before anything is sent; a key does not leave the machine in the clear."""
    got = await drive(target, "unary", "a", OCTAVO_API_KEY=key)
    assert got["error"] == [str(grpc.StatusCode.INVALID_ARGUMENT.value[0])]
    assert got["field"] == [field]
    assert "octavo-key" not in got["message"][0]


async def test_mutual_tls_and_api_keys(tmp_path: Path) -> None:
    """With CA, certificate and key a call is answered; without one of them it is refused."""
    authority = Authority()
    ca = authority.write(tmp_path)
    cert, key = authority.issue().write(tmp_path, "server")
    own_cert, own_key = authority.issue("client.test").write(tmp_path, "client")
    keys = tmp_path / "keys.toml"
    settings = {"api_keys": keys, "tls_cert": cert, "tls_key": key, "tls_client_ca": ca}
    full = {
        "OCTAVO_API_KEY": add_key(keys, name="a", tenant="tenant-a", admin=False),
        "OCTAVO_CA_FILE": str(ca),
        "OCTAVO_CERT_FILE": str(own_cert),
        "OCTAVO_KEY_FILE": str(own_key),
    }

    async with serving(tmp_path, **settings) as secured:

        async def refusal(*missing: str) -> tuple[list[str], list[str]]:
            given = {name: value for name, value in full.items() if name not in missing}
            got = await drive(secured.target, "model", **given)
            return got["error"], got["reason"]

        assert (await drive(secured.target, "model", **full))["vocab_size"] == ["97"]
        unauthenticated = [str(grpc.StatusCode.UNAUTHENTICATED.value[0])]
        assert await refusal("OCTAVO_API_KEY") == (unauthenticated, ["API_KEY_MISSING"])
        unavailable = [str(grpc.StatusCode.UNAVAILABLE.value[0])]
        assert await refusal("OCTAVO_CERT_FILE", "OCTAVO_KEY_FILE") == (unavailable, [""])
        assert await refusal("OCTAVO_CA_FILE") == (unavailable, [""])
        invalid = [str(grpc.StatusCode.INVALID_ARGUMENT.value[0])]
        assert await refusal("OCTAVO_KEY_FILE") == (invalid, [""])


async def test_the_example_streams_to_the_terminal(served: Served) -> None:
    """Its text is the Python SDK's; bad arguments and a refused request are told apart."""
    client, stack = served
    flags = ("--target", stack.target, "--temperature", "0", "--max-tokens", "20")
    status, output, _ = await run("octavo-generate", *flags, "The capital of France is")
    answer = await client.generate("The capital of France is", temperature=0, max_tokens=20)
    assert (status, output) == (0, f"{answer.text}\n")
    status, _, errors = await run("octavo-generate", "--max-tokens", "many", "a")
    assert status == 2
    assert "--max-tokens many" in errors
    status, _, errors = await run(
        "octavo-generate", "--target", stack.target, "--temperature", "500", "a"
    )
    assert status == 1
    assert "sampling.temperature must be between 0 and 100" in errors


async def test_ctrl_c_cancels_the_example(served: Served) -> None:
    """It ends with 130, as programs that Ctrl-C ended do, and its blocks come back."""
    client, stack = served
    process = await asyncio.create_subprocess_exec(
        _BUILD / "octavo-generate",
        "--target",
        stack.target,
        "--max-tokens",
        "2000",
        "Count to a thousand: 1, 2, 3,",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert process.stdout is not None
    assert await asyncio.wait_for(process.stdout.read(8), _RUN_SECONDS)
    process.send_signal(signal.SIGINT)
    await asyncio.wait_for(process.communicate(), _RUN_SECONDS)
    assert process.returncode == 130
    await until_free(client)
