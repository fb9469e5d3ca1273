"""Count the resources that a proxy holds when it should hold none; no other test code reads its state."""

from __future__ import annotations

from kproxy.proxy.client_session import ClientSession
from tests.support.processes.running_proxy import RunningProxy


def what_is_left(proxy: RunningProxy) -> list[str]:
    """Resources open or held for requests, though all are answered; open connections do not count."""
    return [left for session in proxy.listener._sessions for left in _left_in(session)]


def _left_in(session: ClientSession) -> list[str]:
    fanout = session._fanout
    held = {
        "answers": len(session._answers.slots),
        "backlog": len(session._backlog or ()),
        "bytes in flight": session._answers.in_flight_bytes,
        "exchanges": fanout.open_count,
        "plain requests": fanout.plain.open_count,
        "open partitions": fanout.core.open_partitions + fanout.plain.open_partitions,
        "responds": len(fanout._responds),
        "events": len(fanout._events) + len(fanout.connections._losses) + len(fanout.connections._doubted),
        "pieces": len(fanout.core._in_flight.pieces) + len(fanout.core._in_flight._sequences or ()),
        "lanes": len(fanout.core.lanes),
        "released": len(fanout.core._outcomes.released) + len(fanout.core._actions),
        "answers kept for reads": len(fanout.core._reads.found),
        "refreshes": len(fanout.lookups._tasks),
        "tasks": len(session._control.tasks),
        "pauses": session._broker_pressure + session._client_pressure + (not session._reading),
        "unanswered": sum(len(upstream.unanswered()) for upstream in session._connections.by_place.values()),
    }
    return [f"{session.peer}: {count} {what}" for what, count in held.items() if count]
