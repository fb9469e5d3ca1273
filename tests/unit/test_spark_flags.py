"""Where a job is to run, as flags say it: what Spark would end with is told before Spark is started."""

from __future__ import annotations

import pytest

from kproxy.cli.spark_flags import session_options
from kproxy.errors import StartupError


@pytest.mark.parametrize(
    "master", [None, "local", "local[*]", "local[2,3]", "yarn", "spark://a:7077,b:7077", "k8s://https://c"]
)
@pytest.mark.parametrize("memory", [None, "2g", "512M"])
def test_what_spark_takes_passes(master: str | None, memory: str | None) -> None:
    options = session_options("job", master, memory, ())
    assert (options.master, options.memory) == (master, memory)


@pytest.mark.parametrize(
    ("master", "memory", "said"),
    [
        ("foo", None, "--master foo is no master"),
        ("spark:7077", None, "--master spark:7077 is no master"),
        (None, "much", "--memory much is no size"),
        (None, "512", "--memory 512 is no size"),
    ],
)
def test_what_it_does_not_take_is_named(master: str | None, memory: str | None, said: str) -> None:
    with pytest.raises(StartupError, match=said):
        session_options("job", master, memory, ())
