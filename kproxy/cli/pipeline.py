"""`kproxy pipeline`: group the jobs `ingest` and `audit`, define the command `path`, and check Spark's flags.

The module of a job is imported only when the job runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from kproxy.cli import LazyGroup
from kproxy.cli.options import F, file_flag, flag
from kproxy.config.parsing import read_file
from kproxy.errors import StartupError

if TYPE_CHECKING:
    from kproxy.pipeline.kafka_access import KafkaOptions
    from kproxy.pipeline.session import SessionOptions

COMMANDS = {
    "ingest": ("kproxy.cli.pipeline_ingest", "Write files, a topic or a counter to a topic, through the proxy."),
    "audit": ("kproxy.cli.pipeline_audit", "Check that what was acknowledged is in the logs."),
    "path": ("kproxy.cli.pipeline:path", "Print the file to give to spark-submit."),
}


class _Jobs(LazyGroup):
    commands_by_name = COMMANDS


@click.command("pipeline", cls=_Jobs)
def command() -> None:
    """Ingest data with Spark, or audit acknowledged records.

    Spark runs on this machine, or on a cluster with --master; or spark-submit starts the command there:

    \b
      kproxy pipeline audit --bootstrap 127.0.0.1:9092
      kproxy pipeline audit --bootstrap 127.0.0.1:9092 --master spark://spark:7077 --output /mnt/shared/audit
      spark-submit --master yarn $(kproxy pipeline path) audit --bootstrap 127.0.0.1:9092 --output hdfs:///audit

    Ingest, and audit on Spark, need Java 17 or 21 and the extra `spark`: docs/install.md.
    """


@click.command("path")
@flag(
    "--py-files",
    "DIR",
    "Write the archive that executors need to DIR, and print its path.",
    type=click.Path(path_type=Path, file_okay=False),
)
def path(py_files: Path | None) -> None:
    """Print the file to give to spark-submit.

    If spark-submit runs the job's driver on this machine, the job itself gives its executors the modules of kproxy that
    they need. With --deploy-mode cluster the driver's machine must have kproxy installed.

    \b
      spark-submit $(kproxy pipeline path) ingest --help
      spark-submit --py-files $(kproxy pipeline path --py-files /tmp) $(kproxy pipeline path) audit ...
    """
    if py_files is None:
        click.echo(str(resources.files("kproxy.cli.submitted") / "kproxy_pipeline.py"))
        return
    from kproxy.pipeline.session import package_archive

    try:
        py_files.mkdir(parents=True, exist_ok=True)
        archive = package_archive(py_files)
    except OSError as error:
        raise StartupError(
            f"--py-files: nothing can be written to {py_files} ({error.strerror or error}): name another directory."
        ) from error
    click.echo(str(archive))


def kafka_flags(meaning: str) -> Callable[[F], F]:
    """Add `--kafka-option` with this meaning, and `--command-config`."""
    option = flag("--kafka-option", "K=V", meaning, multiple=True)
    about = "Such options in a file, as of Kafka's tools: for passwords, which others see in a command line."
    config = file_flag("--command-config", about)
    return lambda command: option(config(command))


def kafka_options(texts: Sequence[str], config: Path | None) -> KafkaOptions:
    """Return the options of Kafka's clients that are given; a flag wins over the file.

    Raise StartupError. Names with Spark's prefix `kafka.` are accepted too.
    """
    from kproxy.pipeline.ingest.options import parse_pair
    from kproxy.pipeline.kafka_access import MAX_CONFIG_BYTES, KafkaOptions, WrongKafkaOption, read_properties

    given: dict[str, str] = {}
    if config is not None:
        named = f"--command-config {config}"
        text = read_file(config, "--command-config", MAX_CONFIG_BYTES, "that is another file")
        try:
            given = read_properties(text.decode(), named)
        except WrongKafkaOption as error:
            raise StartupError(str(error)) from error
        except UnicodeDecodeError:
            # The error is not chained, because its cause has the content of the file.
            raise StartupError(f"{named} is not UTF-8 text.") from None
    given |= dict(parse_pair(text, "--kafka-option") for text in texts)
    return KafkaOptions((name.removeprefix("kafka."), value) for name, value in given.items())


_MASTER: Final = re.compile(r"local(\[[^]]+\])?|local-cluster\[[^]]+\]|yarn|[a-z0-9]+://.+")
_STANDALONE: Final = "spark://"
_MEMORY: Final = re.compile(r"[1-9]\d{0,11}[kmgt]", re.IGNORECASE)


def spark_flags(command: F) -> F:
    """Add --master, --memory and --conf."""
    about_master = "The Spark master: local[N], spark://H:P, yarn, k8s://URL. [local[*], this machine]"
    master = flag("--master", "MASTER", about_master)
    memory = flag("--memory", "SIZE", "Memory of Spark's driver, as in 2g. [1g]")
    return master(memory(flag("--conf", "KEY=VALUE", "A Spark setting.", multiple=True)(command)))


def session_options(
    app_name: str, master: str | None, memory: str | None, conf: tuple[str, ...], *, kafka: bool = True
) -> SessionOptions:
    """Check the flags of Spark, as Spark's Java only reports that it failed.

    Raises StartupError.
    """
    from kproxy.pipeline.session import SessionOptions

    if master is not None and _MASTER.fullmatch(master) is None:
        raise StartupError(f"--master {master} is not a Spark master: give local[N], spark://H:P, yarn or k8s://URL.")
    if memory is not None and _MEMORY.fullmatch(memory) is None:
        raise StartupError(f"--memory {memory} is not a size: write a number and k, m or g, as in 512m or 2g.")
    settings = {}
    for setting in conf:
        name, equals, value = setting.partition("=")
        if not equals or not name.startswith("spark."):
            raise StartupError(f"--conf {setting} is not a Spark setting: give --conf spark.some.name=VALUE.")
        settings[name] = value
    return SessionOptions(app_name=app_name, master=master, memory=memory, settings=settings, kafka=kafka)


def check_master(options: SessionOptions) -> None:
    """Check that a standalone master listens, as Spark would retry for a minute.

    Raises StartupError.
    """
    if options.master is None or not options.master.startswith(_STANDALONE):
        return
    from kproxy.pipeline.preflight import check_reachable

    addresses = options.master.removeprefix(_STANDALONE)
    check_reachable(addresses, "--master", "give the address that the master's own page shows, spark://HOST:PORT")
