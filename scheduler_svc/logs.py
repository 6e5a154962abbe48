"""Structured logs on stderr, with the ids of the request or step bound to each line.

Event names are constants in the past tense ("request_finished"). No prompt and no
output is ever logged, and nothing is logged per token.
"""

from __future__ import annotations

import logging
import sys
from contextlib import AbstractContextManager
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


def configure_logging(level: str = "info", form: Literal["console", "json"] = "console") -> None:
    """Send structlog's and the standard library's events through one renderer to stderr.

    Calling it again replaces the earlier set-up.
    """
    final: list[Processor] = [structlog.stdlib.ProcessorFormatter.remove_processors_meta]
    if form == "json":
        final += [structlog.processors.dict_tracebacks, structlog.processors.JSONRenderer()]
    else:
        final += [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
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
        cache_logger_on_first_use=False,
    )


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """Give the logger of a module."""
    logger: structlog.stdlib.BoundLogger = structlog.get_logger(name)
    return logger


def bound_ids(**ids: object) -> AbstractContextManager[None]:
    """Bind ids to every line that this task, or one that it starts, logs inside the block."""
    return structlog.contextvars.bound_contextvars(**ids)
