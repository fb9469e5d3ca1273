"""What a proxy still holds when it should hold nothing: the one place where tests look into it from outside."""

from __future__ import annotations

from kproxy.proxy.client_session import ClientSession
from tests.support.running_proxy import RunningProxy


def what_is_left(proxy: RunningProxy) -> list[str]:
    """Whatever is open or held for requests, though all are answered; open connections are as they should be."""
    return [left for session in proxy.listener._sessions for left in _left_in(session)]


def _left_in(session: ClientSession) -> list[str]:
    fanout = session._fanout
    held = {
        "answers": len(session._answers.slots),
        "backlog": len(session._backlog),
        "bytes in flight": session._answers.in_flight_bytes,
        "exchanges": fanout.open_count,
        "lanes": len(fanout._order.lanes),
        "released": len(fanout._order._released),
        "looks": len(fanout._exchanges.looks.waiting),
        "refreshes": len(fanout._failures.lookups._tasks),
        "tasks": len(session._control.tasks),
        "pauses": session._broker_pressure + session._client_pressure + (not session._reading),
        "unanswered": sum(len(upstream.unanswered()) for upstream in session._connections.by_broker.values()),
    }
    return [f"{session.peer}: {count} {what}" for what, count in held.items() if count]
