"""What is done with tasks."""

from __future__ import annotations

import asyncio
from typing import Any


async def cancel(task: asyncio.Task[Any]) -> None:
    """End a task and wait until it has ended."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
