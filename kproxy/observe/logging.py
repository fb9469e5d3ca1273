"""Configure logging to stderr, as text or JSON, with a bound on the lines of one kind.

stdout is for the ready line and for the output of commands. Events are constant phrases. All that varies is in fields,
which are numbers, strings, or lists of these. Times are UTC. The loggers of libraries write in the same format.

The bound keeps a client that sends invalid data in a loop from filling the disk. A kind is a level and an event,
without its fields; for the standard library's loggers it is the level and the message before its arguments are filled
in. A line may have a bound of its own, `most_a_minute=N`, and name a field whose values make separate kinds,
`bounded_by=NAME`.

States of a kind
  unknown    no line of it was logged for a minute
  counting   its minute has begun with a line; lines are logged up to its bound, and the rest is counted

Transitions
  unknown  -> counting   its first line
  counting -> unknown    its minute is over; if lines were left out, one line, itself never left out, has said how many

Invariants
1. A line is logged or counted, and each count is logged when the minute is over or the process ends.
2. At most MOST_KINDS kinds are known at a time; further kinds count as one kind per level.
"""

from __future__ import annotations

import atexit
import contextvars
import logging
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Final

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

MOST_A_MINUTE = 60
MINUTE_S = 60.0
MOST_KINDS = 500
ANYTHING_ELSE = "anything else"

Say = Callable[[str, str, int], None]
"""Log that lines of a level and an event were left out, and how many, regardless of bounds."""
Later = Callable[[float, Callable[[], None]], None]


def in_a_thread(seconds: float, call: Callable[[], None]) -> None:
    """Make a call later, on a daemon thread, as there may be no event loop."""
    # The context has the fields that are bound to every line of this process.
    timer = threading.Timer(seconds, contextvars.copy_context().run, (call,))
    timer.daemon = True
    timer.start()


class LogBound:
    """Admit or count each line. Lines may come from any thread."""

    def __init__(self, say: Say, *, clock: Callable[[], float] = time.monotonic, later: Later = in_a_thread) -> None:
        self._say = say
        self._clock = clock
        self._later = later
        self._lock = threading.Lock()
        # By level and event: the start of the kind's minute, its lines since then, and the number of logged ones.
        self._kinds: dict[tuple[str, str], tuple[float, int, int]] = {}
        self._is_due = False

    def admits(self, level: str, event: str, most: int = MOST_A_MINUTE) -> bool:
        """Count a line, and return whether to log it."""
        with self._lock:
            now = self._clock()
            kind = (level, event)
            if kind not in self._kinds and len(self._kinds) >= MOST_KINDS:
                self._forget_quiet(now)
                if len(self._kinds) >= MOST_KINDS:
                    kind = (level, ANYTHING_ELSE)
            since, lines, most = self._kinds.get(kind, (now, 0, most))
            if now - since >= MINUTE_S and lines <= most:
                since, lines = now, 0
            self._kinds[kind] = since, lines + 1, most
            if lines < most:
                return True
            tells_later, self._is_due = not self._is_due, True
        if tells_later:
            self._later(max(0.0, since + MINUTE_S - now), self.tell)
        return False

    def tell(self, *, at_once: bool = False) -> None:
        """Log how many lines were left out in minutes that are over.

        With `at_once` also in minutes that are not over.
        """
        due = []
        with self._lock:
            now = self._clock()
            for kind, (since, lines, most) in list(self._kinds.items()):
                if lines > most and (at_once or now - since >= MINUTE_S):
                    due.append((kind, lines - most))
                    del self._kinds[kind]
            ends = [since + MINUTE_S for since, lines, most in self._kinds.values() if lines > most]
            self._is_due = bool(ends)
        if ends:
            self._later(max(0.0, min(ends) - now), self.tell)
        for (level, event), count in due:
            self._say(level, event, count)

    def _forget_quiet(self, now: float) -> None:
        for kind, (since, lines, most) in list(self._kinds.items()):
            if now - since >= MINUTE_S and lines <= most:
                del self._kinds[kind]


LEVELS = ("debug", "info", "warning", "error")

# Keys whose values structlog and its bridge to the standard library use themselves.
_OF_STRUCTLOG: Final = frozenset({"exc_info", "stack_info", "_record", "_from_structlog"})
_PLAIN: Final = frozenset({str, int, float, bool, type(None)})

# The class of all loggers; each keeps its object. `set_level` replaces the methods.
_Logger: Final = type("_Logger", (structlog.make_filtering_bound_logger(logging.INFO),), {})

# Marks the line that says how many were left out, which is always logged.
_TOLD: Final = "_told"


def configure_logging(level: str, log_format: str | None = None) -> None:
    """Log `level` and above in `log_format`, json or text: by default text with colours on a terminal, else JSON.

    Loggers of the standard library, which libraries use, log warnings and above.
    """
    on_terminal = sys.stderr.isatty()
    bound = LogBound(_say)
    opening: list[Processor] = [structlog.contextvars.merge_contextvars, structlog.stdlib.add_log_level]
    shaping: list[Processor] = [structlog.processors.TimeStamper(fmt="iso", utc=True), _in_plain_values]
    rendering: list[Processor] = (
        [structlog.processors.format_exc_info, _event_first, structlog.processors.JSONRenderer()]
        if (log_format or ("text" if on_terminal else "json")) == "json"
        else [
            _printable,
            structlog.dev.ConsoleRenderer(colors=on_terminal, exception_formatter=structlog.dev.plain_traceback),
        ]
    )
    structlog.configure(
        processors=[*opening, _Bounded(bound), *shaping, *rendering],
        wrapper_class=_Logger,
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*opening, structlog.stdlib.add_logger_name, *shaping],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
        )
    )
    handler.addFilter(lambda record: bound.admits(record.levelname.lower(), str(record.msg)))
    logging.basicConfig(handlers=[handler])
    set_level(level)
    atexit.register(bound.tell, at_once=True)


def set_level(level: str) -> None:
    """Log `level` and above from now on, also by loggers that are in use."""
    number = getattr(logging, level.upper())
    for name, method in vars(structlog.make_filtering_bound_logger(number)).items():
        if not name.startswith("_"):
            setattr(_Logger, name, method)
    logging.getLogger().setLevel(max(logging.WARNING, number))


class _Bounded:
    """The processor that drops lines beyond the bound."""

    def __init__(self, bound: LogBound) -> None:
        self._bound = bound

    def __call__(self, logger: WrappedLogger, method_name: str, event_dict: EventDict) -> EventDict:
        most = event_dict.pop("most_a_minute", MOST_A_MINUTE)
        kind = str(event_dict["event"])
        if field := event_dict.pop("bounded_by", None):
            kind = f"{kind}: {event_dict[field]}"
        if event_dict.pop(_TOLD, False) or self._bound.admits(event_dict["level"], kind, most):
            return event_dict
        raise structlog.DropEvent


def _say(level: str, event: str, count: int) -> None:
    method = level if level in LEVELS else "error"
    getattr(structlog.get_logger(__name__), method)("similar lines left out", of=event, lines=count, **{_TOLD: True})


def _event_first(logger: WrappedLogger, method_name: str, event_dict: EventDict) -> EventDict:
    """Put the fields that every line has before its own fields."""
    return {key: event_dict[key] for key in ("timestamp", "level", "event")} | dict(event_dict)


def _in_plain_values(logger: WrappedLogger, method_name: str, event_dict: EventDict) -> EventDict:
    """Turn values of other types into strings, numbers and lists of them."""
    for key, value in event_dict.items():
        if key not in _OF_STRUCTLOG and type(value) not in _PLAIN:
            event_dict[key] = _plain(value)
    return event_dict


def _printable(logger: WrappedLogger, method_name: str, event_dict: EventDict) -> EventDict:
    """Replace unprintable characters, as clients choose many names: these must not control a terminal."""
    for key, value in event_dict.items():
        if isinstance(value, str) and key not in _OF_STRUCTLOG and not value.isprintable():
            event_dict[key] = "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in value)
    return event_dict


def _plain(value: object) -> object:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, Collection) and not isinstance(value, str):
        return [_plain(each) for each in value]
    return value if isinstance(value, (int, float)) else str(value)
