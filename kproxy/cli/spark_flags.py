"""The flags that say where a pipeline job runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kproxy.errors import StartupError

if TYPE_CHECKING:
    from kproxy.pipeline.session import SessionOptions

F = TypeVar("F", bound=Callable[..., Any])


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
    """Raises StartupError for a setting that is none."""
    from kproxy.pipeline.session import SessionOptions

    settings = {}
    for setting in conf:
        name, equals, value = setting.partition("=")
        if not equals or not name.startswith("spark."):
            raise StartupError(f"--conf {setting} is no setting of Spark's: give --conf spark.some.name=VALUE.")
        settings[name] = value
    return SessionOptions(app_name=app_name, master=master, memory=memory, settings=settings, kafka=kafka)
