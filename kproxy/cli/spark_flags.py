"""The flags that say where a pipeline job runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from kproxy.errors import StartupError

if TYPE_CHECKING:
    from kproxy.pipeline.session import SessionOptions

F = TypeVar("F", bound=Callable[..., Any])
_MASTER: Final = re.compile(r"local(\[[^]]+\])?|local-cluster\[[^]]+\]|yarn|[a-z0-9]+://.+")
_STANDALONE: Final = "spark://"
_MEMORY: Final = re.compile(r"[1-9]\d{0,11}[kmgt]", re.IGNORECASE)


def spark_flags(function: F) -> F:
    """--master, --memory and --conf: arguments `master`, `memory` and `conf` of the command."""
    for option in reversed(
        (
            click.option(
                "--master",
                metavar="MASTER",
                help="Where Spark runs: local[N], spark://H:P, yarn, k8s://URL. [local[*], this machine]",
            ),
            click.option("--memory", metavar="SIZE", help="Memory of Spark's driver, as in 2g. [1g]"),
            click.option("--conf", metavar="KEY=VALUE", multiple=True, help="A setting of Spark's; may be repeated."),
        )
    ):
        function = option(function)
    return function


def session_options(
    app_name: str, master: str | None, memory: str | None, conf: tuple[str, ...], *, kafka: bool = True
) -> SessionOptions:
    """Raises StartupError for what Spark's Java would end with, saying nothing but that it did."""
    from kproxy.pipeline.session import SessionOptions

    if master is not None and _MASTER.fullmatch(master) is None:
        raise StartupError(f"--master {master} is no master of Spark's: give local[N], spark://H:P, yarn or k8s://URL.")
    if memory is not None and _MEMORY.fullmatch(memory) is None:
        raise StartupError(f"--memory {memory} is no size: write a number and k, m or g, as in 512m or 2g.")
    settings = {}
    for setting in conf:
        name, equals, value = setting.partition("=")
        if not equals or not name.startswith("spark."):
            raise StartupError(f"--conf {setting} is no setting of Spark's: give --conf spark.some.name=VALUE.")
        settings[name] = value
    return SessionOptions(app_name=app_name, master=master, memory=memory, settings=settings, kafka=kafka)


def check_master(options: SessionOptions) -> None:
    """Raises StartupError where no standalone master listens: Spark would ask for it for a minute, and say little."""
    if options.master is None or not options.master.startswith(_STANDALONE):
        return
    from kproxy.pipeline.preflight import check_reachable

    addresses = options.master.removeprefix(_STANDALONE)
    check_reachable(addresses, "--master", "give the address that the master's own page shows, spark://HOST:PORT")
