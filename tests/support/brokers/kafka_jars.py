"""Get Apache Kafka's own jars for tests and measurements, without Maven: tools, clients, and a real broker.

The Ivy that pyspark carries resolves them from Maven Central, once per user; after that no network access is needed.
The functions skip the test if the jars are not available.

Clients of earlier releases come with only the jars they need: without the libraries of compression types.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from kproxy.errors import StartupError
from kproxy.pipeline.java import Java, find_java, trust_options, user_cache_dir
from kproxy.pipeline.spark import pyspark_home

KAFKA_VERSION = "4.3.1"
EARLIER_KAFKA_VERSION = "3.9.1"
"""The last release line before 4: brokers of it can be rolled to 4, and back while metadata.version stays."""
# The client releases in use: the last of each release line that has its own behaviour with a current broker.
CLIENT_VERSIONS = (
    *("0.11.0.3", "1.0.2", "1.1.1", "2.0.1", "2.1.1", "2.3.1", "2.4.1", "2.7.2", "2.8.2"),
    *("3.6.2", "3.7.2", "3.8.1", "3.9.1", "4.0.2", "4.1.1", KAFKA_VERSION),
)
REGISTRY_VERSION = "2.6.13.Final"
RESOLVE_TIMEOUT_S = 600.0
RESOLVE_ATTEMPTS = 3
# The two excluded modules serve Connect's REST server, which nothing here runs. A broker without a logging back end
# logs nothing, not even its start.
_BROKER_MODULE = """\
<ivy-module version="2.0">
  <info organisation="kproxy" module="kafka-for-tests"/>
  <configurations><conf name="default"/></configurations>
  <dependencies defaultconf="default->compile,runtime,master">
    <dependency org="org.apache.kafka" name="kafka_2.13" rev="%(version)s"/>
    <dependency org="org.apache.kafka" name="kafka-tools" rev="%(version)s"/>
    <dependency org="org.apache.logging.log4j" name="log4j-slf4j-impl" rev="2.25.4"/>
    <exclude org="org.apache.kafka" module="connect-runtime"/>
    <exclude module="jackson-jakarta-rs-json-provider"/>
  </dependencies>
</ivy-module>
"""


# Each version has a configuration of its own; otherwise Ivy would keep only the newest.
_CLIENTS_MODULE = f"""\
<ivy-module version="2.0">
  <info organisation="kproxy" module="clients-for-tests"/>
  <configurations>{"".join(f'<conf name="{each}"/>' for each in CLIENT_VERSIONS)}</configurations>
  <dependencies>
    {
    "".join(
        f'''<dependency org="org.apache.kafka" name="kafka-clients" rev="{each}" conf="{each}->master"
        transitive="false"/>'''
        for each in CLIENT_VERSIONS
    )
}
    <dependency org="org.slf4j" name="slf4j-nop" rev="1.7.36" conf="*->compile,runtime,master"/>
  </dependencies>
</ivy-module>
"""

# Apicurio Registry, whole: a schema registry that needs no Kafka.
_REGISTRY_MODULE = f"""\
<ivy-module version="2.0" xmlns:m="http://ant.apache.org/ivy/maven">
  <info organisation="kproxy" module="registry-for-tests"/>
  <configurations><conf name="default"/></configurations>
  <dependencies defaultconf="default->master">
    <dependency org="io.apicurio" name="apicurio-registry-app" rev="{REGISTRY_VERSION}" transitive="false">
      <artifact name="apicurio-registry-app" type="tar.gz" ext="tar.gz" m:classifier="all"/>
    </dependency>
  </dependencies>
</ivy-module>
"""


def registry_archive() -> Path:
    """The archive of Apicurio Registry. The first call downloads 136 MiB."""
    (found,) = _resolved(f"apicurio-{REGISTRY_VERSION}", _REGISTRY_MODULE, "").glob("*.tar.gz")
    return found


def kafka_classpath(version: str = KAFKA_VERSION) -> str:
    """The class path for `java -cp` that runs any of Kafka's programs. The first call may take minutes (44 MiB)."""
    return str(_resolved(version, _BROKER_MODULE % {"version": version}, "") / "*")


def client_classpath(version: str) -> str:
    """The class path for `java -cp` of a client of one of CLIENT_VERSIONS. The first call downloads 82 MiB."""
    digest = hashlib.sha256(_CLIENTS_MODULE.encode()).hexdigest()[:16]
    return str(_resolved(f"clients-{digest}", _CLIENTS_MODULE, "[conf]/") / version / "*")


def pyspark_jars(*patterns: str) -> str:
    """The class path for `java -cp` of jars that pyspark carries, one for each pattern."""
    try:
        found = [next((pyspark_home() / "jars").glob(pattern), None) for pattern in patterns]
    except StartupError as error:
        pytest.skip(str(error))
    if None in found:
        pytest.skip(f"this pyspark does not carry all of {', '.join(patterns)}")
    return os.pathsep.join(map(str, found))


def _resolved(name: str, module: str, folder: str) -> Path:
    """The directory of a module's jars, or a skip; `folder` is Ivy's pattern for the directories in it."""
    found = _jars(name, module, folder)
    if isinstance(found, str):
        pytest.skip(found)
    return found


@functools.cache
def _jars(name: str, module: str, folder: str) -> Path | str:
    """The directory of the jars, or the reason why there is none; both results are cached."""
    jars = user_cache_dir() / "kafka" / name
    if jars.is_dir():
        return jars
    try:
        java = find_java()
        ivy = next((pyspark_home() / "jars").glob("ivy-*.jar"), None)
    except StartupError as error:
        return str(error)
    if ivy is None:
        return "this pyspark carries no Ivy to resolve Kafka's jars with"
    jars.parent.mkdir(parents=True, exist_ok=True)
    # Built beside its final place and moved there whole: an interrupted or a concurrent run never leaves half a set.
    aside = Path(tempfile.mkdtemp(dir=jars.parent, prefix=".resolving-"))
    try:
        for _ in range(RESOLVE_ATTEMPTS):
            # The downloads of the previous attempt are still there.
            problem = _resolve(java, ivy, aside, module, folder)
            if problem is None:
                break
        else:
            return str(problem)
        try:
            (aside / "jars").rename(jars)
        except OSError:
            if not jars.is_dir():
                raise
        return jars
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _resolve(java: Java, ivy: Path, aside: Path, module: str, folder: str) -> str | None:
    """Fill `aside`/jars; return the error, if any."""
    description = aside / "ivy.xml"
    description.write_text(module)
    command: list[str | os.PathLike[str]] = [java.executable, *trust_options(java, aside / "truststore")]
    command += ["-jar", ivy, "-ivy", description, "-cache", aside / "cache"]
    # snappy-java and a few more call themselves bundles, not jars.
    command += [
        "-types",
        "jar",
        "bundle",
        "tar.gz",
        "-retrieve",
        f"{aside}/jars/{folder}[artifact]-[revision](-[classifier]).[ext]",
    ]
    try:
        done = subprocess.run(
            [*command, "-warn"], capture_output=True, text=True, timeout=RESOLVE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"Kafka's jars could not be downloaded within {RESOLVE_TIMEOUT_S:.0f} s"
    # Ivy has reported which jars it could not get.
    if done.returncode != 0 or not (aside / "jars").is_dir():
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip(" .")]
        return f"Kafka's jars could not be resolved from Maven Central: {' | '.join(lines[-3:])}"
    return None
