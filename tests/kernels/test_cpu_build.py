"""The C kernels are compiled once, by whoever comes first, or said not to be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from octavo_kernels.cpu import build
from octavo_kernels.cpu.build import KernelsUnavailable
from octavo_kernels.cpu.library import library

from executor_svc import attention_choice
from executor_svc.attention_choice import choose_attention
from executor_svc.errors import StartupError
from executor_svc.pool import KvPool, KvShape

# Loads the kernels, uses them from two threads, and says what OpenMP is in the process.
USE = """
import torch
from octavo_kernels.cpu.library import library, openmp_runtimes
words = torch.arange(1 << 20, dtype=torch.int32)
assert library().octavo_read(words.data_ptr(), 4 << 20, 2) == int(words.sum()) % 2**32
print(len(openmp_runtimes()))
"""


def use(cache: Path, **environment: str) -> subprocess.Popen[str]:
    """Start a process that uses the kernels from a cache folder."""
    variables = {**os.environ, "XDG_CACHE_HOME": str(cache), **environment}
    return subprocess.Popen(
        [sys.executable, "-P", "-c", USE],
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    return out.strip()


def compiler_that(tmp_path: Path, script: str) -> str:
    """Write a compiler that counts its compilations in `tmp_path/compiled`."""
    path = tmp_path / "compiler"
    lines = [
        "#!/bin/sh",
        '[ "$1" = --version ] && echo 1.0 && exit 0',
        f'echo >> "{tmp_path}/compiled"',
        script,
    ]
    path.write_text("\n".join(lines), encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def num_compiled(tmp_path: Path) -> int:
    counted = tmp_path / "compiled"
    return len(counted.read_text().splitlines()) if counted.exists() else 0


def test_processes_that_start_together_all_get_the_kernels(tmp_path: Path) -> None:
    """Two first uses race; both work, one file stays; nobody compiles again.

    A file that was cut short, as by a full disk, is noticed and made anew. And the
    kernels bring no OpenMP runtime beside torch's.
    """
    compiler = compiler_that(tmp_path, 'exec cc "$@"')
    assert {finish(each) for each in [use(tmp_path, CC=compiler) for _ in range(2)]} == {"1"}
    (cached,) = (tmp_path / "octavo" / "kernels").iterdir()
    compiled = num_compiled(tmp_path)
    assert compiled in {1, 2}
    assert finish(use(tmp_path, CC=compiler)) == "1"
    assert num_compiled(tmp_path) == compiled
    cached.write_bytes(cached.read_bytes()[:-1000])
    assert finish(use(tmp_path, CC=compiler)) == "1"
    assert num_compiled(tmp_path) == compiled + 1


def test_a_prebuilt_library_needs_no_compiler(tmp_path: Path) -> None:
    """`build --out` prints a file that OCTAVO_CPU_KERNELS takes."""
    command = [sys.executable, "-P", "-m", "octavo_kernels.cpu.build", "--out", str(tmp_path)]
    built = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert Path(built).parent == tmp_path
    nowhere = {"CC": str(tmp_path / "none"), "OCTAVO_CPU_KERNELS": built}
    assert finish(use(tmp_path / "cache", **nowhere)) == "1"


@pytest.fixture
def fresh_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An empty cache, and a process that has not loaded the kernels yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("OCTAVO_CPU_KERNELS", raising=False)
    monkeypatch.setattr(attention_choice, "library", library.__wrapped__)
    return monkeypatch


class Log:
    """Takes the place of a module's log."""

    def __init__(self) -> None:
        self.lines: list[dict[str, object]] = []

    def warning(self, event: str, **fields: object) -> None:
        self.lines.append({"event": event, **fields})


def pool(head_dim: int = 16, dtype: torch.dtype = torch.float32) -> KvPool:
    return KvPool(
        KvShape(num_layers=1, num_kv_heads=1, head_dim=head_dim, dtype=dtype),
        block_size=16,
        num_device_blocks=1,
        num_host_blocks=0,
        device=torch.device("cpu"),
    )


def test_the_compiled_kernels_are_the_default_on_a_cpu() -> None:
    """On a CPU, auto means compiled."""
    assert choose_attention("auto", pool()).name == "compiled"
    assert choose_attention("reference", pool()).name == "reference"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (None, "no C compiler"),
        ("echo 'x.c:1: error: no such thing' >&2; exit 3", "no such thing"),
        ("printf '/usr/bin/ld: cannot find -lm\\n' >&2; exit 1", "cannot find -lm"),
        ("exit 0", "wrote nothing"),
    ],
)
def test_without_a_working_compiler_the_reference_serves(
    fresh_library: pytest.MonkeyPatch, tmp_path: Path, script: str | None, reason: str
) -> None:
    """One line of the log says why; who asked for the compiled kernels is refused."""
    compiler = compiler_that(tmp_path, script) if script else str(tmp_path / "none")
    fresh_library.setenv("CC", compiler)
    log = Log()
    fresh_library.setattr(attention_choice, "_log", log)
    assert choose_attention("auto", pool()).name == "reference"
    (line,) = log.lines
    assert line["event"] == "attention_fell_back"
    assert reason in str(line["reason"])
    assert "\n" not in str(line["reason"])
    with pytest.raises(StartupError, match="--attention compiled"):
        choose_attention("compiled", pool())


def test_a_library_of_other_sources_is_refused(
    fresh_library: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A prebuilt file must be of this version; one that is no library is no better."""
    built = tmp_path / "old.so"
    with fresh_library.context() as patch:
        patch.setattr(build, "sources_digest", lambda: "another")
        build.compile_library(build.find_compiler(), built)
    fresh_library.setenv("OCTAVO_CPU_KERNELS", str(built))
    with pytest.raises(KernelsUnavailable, match="other sources"):
        library.__wrapped__()
    fresh_library.setenv("OCTAVO_CPU_KERNELS", __file__)
    with pytest.raises(KernelsUnavailable, match="not a whole library"):
        library.__wrapped__()


def test_a_given_library_that_was_cut_is_refused(
    fresh_library: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The loader would map it, and the process would die of it; a relative path is fine."""
    build.compile_library(build.find_compiler(), tmp_path / "whole.so")
    whole = (tmp_path / "whole.so").read_bytes()
    (tmp_path / "cut.so").write_bytes(whole[:30_000])
    (tmp_path / "zeroed.so").write_bytes(whole[:20_000] + bytes(9_000) + whole[29_000:])
    fresh_library.chdir(tmp_path)
    for name in ("./cut.so", "zeroed.so"):
        fresh_library.setenv("OCTAVO_CPU_KERNELS", name)
        with pytest.raises(KernelsUnavailable, match="not a whole library"):
            library.__wrapped__()
    fresh_library.setenv("OCTAVO_CPU_KERNELS", "./whole.so")
    assert library.__wrapped__().octavo_supported()


def test_a_compiler_with_flags_and_an_accent(
    fresh_library: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """CC may hold flags; what the compiler says need not be UTF-8."""
    compiler = compiler_that(tmp_path, "printf 'd\\351j\\340 vu' >&2; exec cc \"$@\"")
    fresh_library.setenv("CC", f"{compiler} -DNOTHING")
    assert library.__wrapped__().octavo_supported()


def test_without_a_home_there_is_no_cache(fresh_library: pytest.MonkeyPatch) -> None:
    """As under a user id of a container's own; it is said, not raised as something else."""

    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    fresh_library.delenv("XDG_CACHE_HOME")
    fresh_library.setattr(Path, "home", nobody)
    with pytest.raises(KernelsUnavailable, match="no folder"):
        library.__wrapped__()


def test_pools_that_only_the_reference_serves() -> None:
    """Half precision on a CPU; a GPU's kernels without a GPU."""
    half = pool(dtype=torch.float16)
    assert choose_attention("auto", half).name == "reference"
    with pytest.raises(StartupError, match="float16"):
        choose_attention("compiled", half)
    with pytest.raises(StartupError, match="not on a GPU"):
        choose_attention("triton", pool())
