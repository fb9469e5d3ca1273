"""Run a healthy scripted broker in a process of its own, which a test stops and continues; it prints its port."""

from __future__ import annotations

import asyncio
import sys

from tests.support.brokers.scripted_upstream import ScriptedUpstream, answers_everything


async def main() -> None:
    upstream = await ScriptedUpstream(1, answers_everything).start()
    sys.stdout.write(f"{upstream.port}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
