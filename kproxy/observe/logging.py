"""Where logs go: to stderr, a line an event. stdout stays for the ready line and for what a command was asked.

Lines of one kind are bounded (kproxy.observe.log_bound), those with `most_a_minute=N` to so many.
"""

from __future__ import annotations

import atexit
import logging
import sys
from typing import Final

import structlog
from structlog.typing import EventDict, WrappedLogger

from kproxy.observe.log_bound import MOST_A_MINUTE, LogBound

LEVELS = ("debug", "info", "warning", "error")

# On the line that says how many were left out: that one is not.
_TOLD: Final = "_told"


def configure_logging(level: str) -> None:
    """Log `level` and above, with colours on a terminal. Libraries that log by the standard library: warnings."""
    on_terminal = sys.stderr.isatty()
    bound = LogBound(_say)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            _Bounded(bound),
            structlog.processors.TimeStamper(fmt="%Y-%m-%d %H:%M:%S.%f", utc=False),
            structlog.dev.ConsoleRenderer(colors=on_terminal, exception_formatter=structlog.dev.plain_traceback),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(lambda record: bound.admits(record.levelname.lower(), str(record.msg)))
    logging.basicConfig(handlers=[handler], level=max(logging.WARNING, getattr(logging, level.upper())))
    atexit.register(bound.tell, at_once=True)


class _Bounded:
    """The processor that leaves out what is beyond the bound."""

    def __init__(self, bound: LogBound) -> None:
        self._bound = bound

    def __call__(self, logger: WrappedLogger, method_name: str, event_dict: EventDict) -> EventDict:
        most = event_dict.pop("most_a_minute", MOST_A_MINUTE)
        if event_dict.pop(_TOLD, False) or self._bound.admits(event_dict["level"], str(event_dict["event"]), most):
            return event_dict
        raise structlog.DropEvent


def _say(level: str, sentence: str) -> None:
    method = level if level in LEVELS else "error"
    getattr(structlog.get_logger(__name__), method)(sentence, **{_TOLD: True})
