"""Write docs/images/page-light.png and page-dark.png: the page of `kproxy dev` under load, after a broker's death.

It needs Chromium, and takes half a minute.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import Final

import confluent_kafka

from tests.support.clients.browser import browser
from tests.support.processes.dev import dev_arguments, serving

IMAGES: Final = Path(__file__).parents[1] / "docs" / "images"
MOST_BYTES: Final = 200_000
WIDTH, HEIGHT = 1280, 900
# Client id, topic, bytes of a record, records a second.
LOAD: Final = (
    ("checkout-eu", "orders", 300, 400),
    ("checkout-us", "orders", 300, 250),
    ("mobile-7", "clicks", 120, 600),
    ("sensors", "measurements", 80, 900),
)


def write(kafka: str, client_id: str, topic: str, size: int, a_second: int, ends: threading.Event) -> None:
    """Write records at a steady rate until `ends`."""
    producer = confluent_kafka.Producer({"bootstrap.servers": kafka, "client.id": client_id, "linger.ms": 20})
    while not ends.wait(0.05):
        for _ in range(a_second // 20):
            producer.produce(topic, bytes(size), os.urandom(4))
        producer.poll(0)
    producer.flush(10)


async def take(admin: str) -> None:
    """Write both pictures."""
    async with browser() as tab:
        for scheme in ("light", "dark"):
            await tab.look(WIDTH, HEIGHT, dark=scheme == "dark")
            await tab.goto(f"http://{admin}/")
            await tab.until("document.querySelectorAll('.timeline li').length > 3")
            await asyncio.sleep(1)
            file = IMAGES / f"page-{scheme}.png"
            await tab.screenshot(file)
            size = file.stat().st_size
            sys.stdout.write(f"{file.name}: {size:,} bytes\n")
            if size >= MOST_BYTES:
                raise SystemExit(f"{file} is too large for a README")


def main() -> None:
    """Start everything, kill a broker, and take the pictures once it is back."""
    with tempfile.TemporaryDirectory() as directory:
        data = Path(directory)
        with serving(dev_arguments(data / "data", "--lease-ttl", "3"), data / "stderr") as dev:
            ends = threading.Event()
            writers = [threading.Thread(target=write, args=(dev.kafka, *load, ends)) for load in LOAD]
            for writer in writers:
                writer.start()
            try:
                ends.wait(8)
                next(each for each in dev.descendants() if "--node-id" in each.cmdline()).send_signal(signal.SIGKILL)
                ends.wait(12)
                asyncio.run(take(dev.admin))
            finally:
                ends.set()
                for writer in writers:
                    writer.join()


if __name__ == "__main__":
    main()
