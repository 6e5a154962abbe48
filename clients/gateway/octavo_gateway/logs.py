"""Structured logs on stderr, with the id of the request bound to each line.

Event names are constants in the past tense ("request_finished"). No prompt, no output and
no key is ever logged, and nothing is logged per token.
"""

from __future__ import annotations

import logging
import sys
from typing import Literal

import structlog
from structlog.typing import Processor

_COMMON: list[Processor] = [
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_log_level,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
]


def configure_logging(level: str, form: Literal["auto", "console", "json"]) -> None:
    """Send our events, and the libraries' warnings, through one renderer to stderr."""
    on_terminal = sys.stderr.isatty()
    renderer: list[Processor] = [structlog.dev.ConsoleRenderer(colors=on_terminal)]
    if form == "json" or (form == "auto" and not on_terminal):
        renderer = [structlog.processors.dict_tracebacks, structlog.processors.JSONRenderer()]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*_COMMON, structlog.stdlib.ExtraAdder()],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
        )
    )
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # uvicorn says at this level what the gateway's own events say already.
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *_COMMON,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
