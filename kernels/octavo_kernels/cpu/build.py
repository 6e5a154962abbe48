"""Compiles the C kernels for this machine, once.

The file's name is a digest of all that it depends on: sources, flags, compiler, CPU. It
is written under another name and renamed, so processes that start together need no lock:
the last rename wins, and all files are alike.

For an image without a compiler: `python -m octavo_kernels.cpu.build --out DIR --march
x86-64-v3`, and `OCTAVO_CPU_KERNELS` names the file.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_SOURCES = Path(__file__).parent / "csrc"
_TIMEOUT_SECONDS = 120
_DIGEST_BYTES = hashlib.sha256().digest_size
# No -fopenmp: library.py says whose threads these are.
_FLAGS = ("-std=gnu11", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math")
_LIBRARY_FLAGS = ("-fPIC", "-shared", "-fvisibility=hidden")


class KernelsUnavailable(Exception):
    """The compiled kernels cannot be had here; the message is one line and says why."""


def sources_digest() -> str:
    """Digest of the C sources, which a built library tells too."""
    digest = hashlib.sha256()
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:32]


def cached_library() -> Path:
    """Find this machine's library in the cache, or compile it there.

    Raises:
        KernelsUnavailable: if there is no compiler, it fails, or the cache cannot be written.
    """
    compiler = find_compiler()
    identity = (sources_digest(), *_FLAGS, *_LIBRARY_FLAGS, _version(compiler), _cpu())
    name = hashlib.sha256("\0".join(identity).encode()).hexdigest()[:32] + ".so"
    path = _cache_folder() / name
    if not is_intact(path):
        compile_library(compiler, path)
    return path


def is_intact(path: Path) -> bool:
    """Whether a library is there and complete: its last bytes are the digest of the others."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]


def compile_library(compiler: list[str], path: Path, march: str = "native") -> None:
    """Compile to `path`, which appears complete or not at all.

    Raises:
        KernelsUnavailable: if that fails.
    """
    # On other architectures than x86 it is -mcpu that knows "native".
    machine = "-march" if platform.machine() in {"x86_64", "AMD64"} else "-mcpu"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            built = Path(folder) / path.name
            command = [*compiler, *_FLAGS, *_LIBRARY_FLAGS, f"{machine}={march}"]
            command += [f'-DOCTAVO_SOURCES="{sources_digest()}"', "-o", str(built)]
            command += [str(source) for source in sorted(_SOURCES.glob("*.c"))]
            _run([*command, "-lm"])
            if not built.exists():
                raise KernelsUnavailable(f"{compiler[0]} ended well and wrote nothing")
            # The loader ignores what follows an ELF file's sections.
            content = built.read_bytes()
            built.write_bytes(content + hashlib.sha256(content).digest())
            built.replace(path)
    except OSError as error:
        raise KernelsUnavailable(f"cannot write {path}: {error.strerror or error}") from error


def find_compiler() -> list[str]:
    """The C compiler: `CC`, flags and all, or the first of cc, gcc and clang.

    Raises:
        KernelsUnavailable: if there is none.
    """
    wanted = shlex.split(os.environ.get("CC", ""))
    names = wanted[:1] or ["cc", "gcc", "clang"]
    for name in names:
        if found := shutil.which(name):
            return [found, *wanted[1:]]
    raise KernelsUnavailable(f"no C compiler ({', '.join(names)}) is on the PATH")


def _version(compiler: list[str]) -> str:
    return "\0".join([*compiler, _run([*compiler, "--version"])])


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "LC_ALL": "C"},
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise KernelsUnavailable(
            f"{command[0]} did not end within {_TIMEOUT_SECONDS} seconds"
        ) from error
    except OSError as error:
        raise KernelsUnavailable(f"{command[0]}: {error.strerror}") from error
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["no message"]
        reasons = [line for line in said if "error" in line] or said[-1:]
        raise KernelsUnavailable(f"{command[0]} failed ({done.returncode}): {reasons[0].strip()}")
    return done.stdout


def _cpu() -> str:
    """What -march=native may depend on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    wanted = ("flags", "Features", "model", "cpu family", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(root) if root else Path.home() / ".cache") / "octavo" / "kernels"
    except RuntimeError as error:  # a user id without an entry, and no HOME
        raise KernelsUnavailable(f"no folder for compiled kernels: {error}") from error


def main(argv: list[str] | None = None) -> int:
    """Build a library for another machine and print its path."""
    parser = argparse.ArgumentParser(
        prog="python -m octavo_kernels.cpu.build", description=main.__doc__, allow_abbrev=False
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="Where to put it.")
    parser.add_argument(
        "--march",
        default="native",
        help="The compiler's name for the CPU, such as x86-64-v3 (default: native).",
    )
    options = parser.parse_args(argv)
    path = options.out.resolve() / f"octavo_cpu_{options.march}.so"
    try:
        compile_library(find_compiler(), path, options.march)
    except KernelsUnavailable as error:
        sys.stderr.write(f"octavo_kernels.cpu.build: {error}\n")
        return 1
    sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
