"""Apache Kafka's own jars for tests: the tools and clients of users, and a real broker, without Maven installed.

They are resolved from Maven Central by the Ivy that pyspark carries, once per user; after that nothing is asked of
the network. A test that asks for them is skipped where they can be had in no way.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from kproxy.errors import StartupError
from kproxy.pipeline.cache import user_cache_dir
from kproxy.pipeline.spark import pyspark_home
from kproxy.pipeline.truststore import trust_options
from tests.support.java import require_java

KAFKA_VERSION = "4.3.1"
RESOLVE_TIMEOUT_S = 600.0
# The two excluded modules serve Connect's REST server, which nothing here runs. Without a logging back end a broker
# says nothing at all, not even that it has started.
_MODULE = f"""\
<ivy-module version="2.0">
  <info organisation="kproxy" module="kafka-for-tests"/>
  <configurations><conf name="default"/></configurations>
  <dependencies defaultconf="default->compile,runtime,master">
    <dependency org="org.apache.kafka" name="kafka_2.13" rev="{KAFKA_VERSION}"/>
    <dependency org="org.apache.kafka" name="kafka-tools" rev="{KAFKA_VERSION}"/>
    <dependency org="org.apache.logging.log4j" name="log4j-slf4j-impl" rev="2.25.4"/>
    <exclude org="org.apache.kafka" module="connect-runtime"/>
    <exclude module="jackson-jakarta-rs-json-provider"/>
  </dependencies>
</ivy-module>
"""


def kafka_classpath() -> str:
    """What to give `java -cp` to run any of Kafka's programs, or a skip. The first call may take minutes (44 MiB)."""
    found = _jars()
    if isinstance(found, str):
        pytest.skip(found)
    return str(found / "*")


@functools.cache
def _jars() -> Path | str:
    """The directory of the jars, or why there is none."""
    jars = user_cache_dir() / "kafka" / KAFKA_VERSION
    if jars.is_dir():
        return jars
    try:
        ivy = next((pyspark_home() / "jars").glob("ivy-*.jar"), None)
    except StartupError as error:
        return str(error)
    if ivy is None:
        return "this pyspark carries no Ivy to resolve Kafka's jars with"
    jars.parent.mkdir(parents=True, exist_ok=True)
    # Beside its final place and moved there whole: an interrupted or a second run never leaves half a set.
    aside = Path(tempfile.mkdtemp(dir=jars.parent, prefix=".resolving-"))
    try:
        problem = _resolve(ivy, aside)
        if problem is not None:
            return problem
        try:
            (aside / "jars").rename(jars)
        except OSError:
            if not jars.is_dir():
                raise
        return jars
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _resolve(ivy: Path, aside: Path) -> str | None:
    """Fill `aside`/jars; what went wrong, if anything did."""
    module = aside / "ivy.xml"
    module.write_text(_MODULE)
    java = require_java()
    command: list[str | os.PathLike[str]] = [java.executable, *trust_options(java, aside / "truststore")]
    command += ["-jar", ivy, "-ivy", module, "-cache", aside / "cache"]
    # snappy-java and a few more call themselves bundles, not jars.
    command += ["-types", "jar", "bundle", "-retrieve", f"{aside}/jars/[artifact]-[revision](-[classifier]).[ext]"]
    try:
        done = subprocess.run(
            [*command, "-warn"], capture_output=True, text=True, timeout=RESOLVE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"Kafka's jars could not be downloaded within {RESOLVE_TIMEOUT_S:.0f} s"
    if done.returncode != 0 or not (aside / "jars" / f"kafka-tools-{KAFKA_VERSION}.jar").is_file():
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip(" .")]
        return f"Kafka's jars could not be resolved from Maven Central: {' | '.join(lines[-3:])}"
    return None
