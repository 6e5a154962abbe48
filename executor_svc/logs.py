"""Structured logs on stderr.

Event names are constants in the past tense ("executor_ready" says what became true).
No prompt and no output is ever logged, and nothing is logged per token or per step.
"""

from __future__ import annotations

import logging
import sys
from typing import Literal

import structlog
from structlog.typing import Processor

_SHARED: list[Processor] = [
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_log_level,
    structlog.stdlib.ExtraAdder(),
    structlog.processors.TimeStamper(fmt="iso", utc=True),
    structlog.processors.StackInfoRenderer(),
]


def configure_logging(level: str, form: Literal["auto", "console", "json"]) -> None:
    """Send structlog's and the standard library's events through one renderer to stderr."""
    final: list[Processor] = [structlog.stdlib.ProcessorFormatter.remove_processors_meta]
    on_terminal = sys.stderr.isatty()
    if form == "json" or (form == "auto" and not on_terminal):
        final += [structlog.processors.dict_tracebacks, structlog.processors.JSONRenderer()]
    else:
        final += [structlog.dev.ConsoleRenderer(colors=on_terminal)]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(foreign_pre_chain=_SHARED, processors=final)
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *_SHARED,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
    )


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """Give the logger of a module."""
    logger: structlog.stdlib.BoundLogger = structlog.get_logger(name)
    return logger
