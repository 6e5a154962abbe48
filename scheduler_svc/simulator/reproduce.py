"""Run the studies, and write tables, figures and plots: what `make reproduce` does.

    python -m scheduler_svc.simulator.reproduce [NAME ...] [--small] [--traces FOLDER]
        [--out docs/reproduction] [--seed N] [--jobs N]

Studies run at the same time and share the processes that do the work. Each writes NAME.json,
NAME.png and its section of a page. At the end there is a table of all figures.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from scheduler_svc.simulator.reports import all_studies, pages, pictures, render
from scheduler_svc.simulator.reports.findings import Findings
from scheduler_svc.simulator.reports.study import Context, Study

_DEADLINE_SECONDS = 4 * 3600.0
_MAX_JOBS = 256


class Progress:
    """Says on stderr what is done: one line that changes on a terminal, otherwise one a study."""

    def __init__(self, num_studies: int) -> None:
        """Start the clock."""
        self._started = time.monotonic()
        self._lock = threading.Lock()
        self._num_studies, self._num_over = num_studies, 0
        self._num_runs, self._num_done = 0, 0
        self._is_terminal = sys.stderr.isatty()

    def note_started(self, count: int) -> None:
        """There is more to do."""
        with self._lock:
            self._num_runs += count

    def note_done(self) -> None:
        """A run is done."""
        with self._lock:
            self._num_done += 1
            if self._is_terminal:
                sys.stderr.write(f"\r\x1b[K{self._state()}")
                sys.stderr.flush()

    def note_study(self, study: Study, outcome: str) -> None:
        """A study is over."""
        with self._lock:
            self._num_over += 1
            start = "\r\x1b[K" if self._is_terminal else ""
            sys.stderr.write(f"{start}{self._state()}: {study.name} {outcome}\n")
            sys.stderr.flush()

    def _state(self) -> str:
        seconds = int(time.monotonic() - self._started)
        return (
            f"{self._num_over} of {self._num_studies} studies, {self._num_done} of "
            f"{self._num_runs} runs known so far, {seconds // 60}m{seconds % 60:02}s"
        )


def main(argv: list[str] | None = None) -> int:
    """Run what is asked for.

    Args:
        argv: flags; the process's own if None.
    Returns: exit status: 0, or 1 if a study failed, or 2 if what is asked for is wrong.
    """
    parser = _parser()
    options = parser.parse_args(sys.argv[1:] if argv is None else argv)
    studies = _chosen(parser, options.names, options.traces)
    out: Path | None = options.out
    if out is None and not options.small:
        out = Path("docs/reproduction")
    if out is not None:
        try:
            pictures.check_plotting()
            out.mkdir(parents=True, exist_ok=True)
        except (pictures.PicturesError, OSError) as error:
            parser.error(str(error))
    progress = Progress(len(studies))
    context = Context(
        seed=options.seed,
        small=options.small,
        traces=options.traces,
        note_started=progress.note_started,
        note_done=progress.note_done,
    )
    failed = []
    found: dict[str, Findings] = {}
    with _processes(context, options.jobs) as context:
        for study, future in _run_all(studies, context):
            try:
                findings = future.result()
                if out is not None:
                    _write(out, study, findings, context)
            except Exception as error:  # one study's failure must not end the others
                failed.append(study.name)
                progress.note_study(study, f"failed: {type(error).__name__}: {error}")
            else:
                found[study.name] = findings
                progress.note_study(study, "done")
    done = [(study, found[study.name]) for study in studies if study.name in found]
    sys.stdout.write("\n".join(render.summary_lines(done)) + "\n")
    if out is None:
        sys.stdout.write("nothing was written: --small writes only where --out says\n")
    if failed:
        sys.stdout.write(f"failed: {', '.join(failed)}\n")
    return 1 if failed else 0


@contextmanager
def _processes(context: Context, num_jobs: int) -> Iterator[Context]:
    """Give the context processes to work in, if there are to be more than one."""
    if num_jobs == 1:
        yield context
        return
    # Not forked: threads run here already.
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_jobs, mp_context=spawn)
    try:
        yield replace(context, pool=pool)
    finally:
        pool.shutdown(cancel_futures=True)


def _run_all(
    studies: Sequence[Study], context: Context
) -> Iterator[tuple[Study, Future[Findings]]]:
    """Run all; yields each when it is over. Without a pool they run one after the other."""
    num_threads = 1 if context.pool is None else len(studies)
    threads = ThreadPoolExecutor(num_threads)
    try:
        futures = {threads.submit(study.run, context): study for study in studies}
        for future in as_completed(futures, timeout=_DEADLINE_SECONDS):
            yield futures[future], future
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


def _write(folder: Path, study: Study, findings: Findings, context: Context) -> None:
    text = render.as_json(study, findings, context)
    (folder / f"{study.name}.json").write_text(text, encoding="utf-8")
    if findings.panels:
        pictures.draw(findings.panels, folder / f"{study.name}.png", title=study.title)
    pages.write_section(folder, study, render.as_markdown(study, findings, context))


def _chosen(parser: argparse.ArgumentParser, names: list[str], traces: Path | None) -> list[Study]:
    studies = all_studies()
    known = [study.name for study in studies]
    for name in names:
        if name not in known:
            parser.error(f"there is no study {name!r}; there are {', '.join(known)}")
    chosen = [study for study in studies if not names or study.name in names]
    if traces is None:
        left_out = [study.name for study in chosen if study.needs_traces]
        if len(left_out) == len(chosen):
            parser.error(f"--traces FOLDER is needed for {', '.join(left_out)}")
        if left_out:
            sys.stderr.write(f"left out, as they need --traces: {', '.join(left_out)}\n")
        chosen = [study for study in chosen if not study.needs_traces]
    elif not traces.is_dir():
        parser.error(f"--traces must be a folder, got {traces}")
    return chosen


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scheduler_svc.simulator.reproduce",
        description="Reproduce the PagedAttention paper's figures with the real scheduler core.",
    )
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="studies to run [all]")
    add("--small", action="store_true", help="seconds instead of minutes; figures mean little")
    add("--traces", type=Path, metavar="FOLDER", help="public traces, for studies that use them")
    add("--out", type=Path, metavar="FOLDER", help="where files go [docs/reproduction]")
    add("--seed", type=int, default=0, metavar="N", help="of all that is drawn [0]")
    num_cores = max(1, min(_MAX_JOBS, os.cpu_count() or 1))
    add("--jobs", type=_jobs, default=num_cores, metavar="N", help="processes [one per core]")
    return parser


def _jobs(text: str) -> int:
    value = int(text)
    if not 1 <= value <= _MAX_JOBS:
        raise argparse.ArgumentTypeError(f"must be from 1 to {_MAX_JOBS}, got {value}")
    return value


if __name__ == "__main__":
    sys.exit(main())
