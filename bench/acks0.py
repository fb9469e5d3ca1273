"""`make bench SECTION=acks0`: the cost of having brokers confirm acks=0 requests; some seconds.

Each connection sends windows of acks=0 requests. A window ends in a request with an answer, which shows that the window
has been taken. The proxy sends acks=0 on as it is, or asks for acks=1 and keeps the answers to itself
(`--confirm-acks0`). The two take turns, and the least CPU time of the rounds counts.
"""

from __future__ import annotations

from rich.console import Console

from bench.load import CONNECTIONS, SHAPES, produce_frame
from bench.processes import measure, scratch, started, table_of
from bench.quick import BROKERS, ROUNDS, kproxy

WINDOW = 20
WAYS = {"as sent": "--no-confirm-acks0", "confirmed": "--confirm-acks0"}


def acks0(console: Console) -> None:
    """Measure, and print the table."""
    with scratch() as (stack, directory):
        ports = started(stack, *["null_broker"] * BROKERS)
        proxies = {way: stack.enter_context(kproxy(ports, directory, flag)) for way, flag in WAYS.items()}
        numbers = [f"{way}\n{unit}" for way in WAYS for unit in ("µs/req", "req/s")]
        title = f"CPU of the proxy process with acks=0; {CONNECTIONS} connections"
        table = table_of(title, ["request"], [*numbers, "confirmed /\nas sent"])
        for shape in SHAPES:
            windows = max(1, shape.requests // WINDOW)
            window = produce_frame(shape, acks=0) * (WINDOW - 1) + produce_frame(shape)
            best: dict[str, tuple[float, float]] = {}
            for _ in range(1 + ROUNDS):
                for way, (pid, port) in proxies.items():
                    best[way] = min(best.get(way, (1e9, 1e9)), measure(pid, port, window, windows))
            requests = windows * WINDOW * CONNECTIONS
            cells = [
                cell
                for cpu, elapsed in best.values()
                for cell in (f"{cpu / requests * 1e6:,.1f}", f"{requests / elapsed:,.0f}")
            ]
            table.add_row(shape.name, *cells, f"{best['confirmed'][0] / best['as sent'][0]:.2f}")
        console.print(table)
