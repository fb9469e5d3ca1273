"""Classes of Java that a job brings: compiled when it starts, and handed to the executors as jars.

Spark has a compiler for its own code (Janino), so neither a JDK nor a build is needed.
"""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

from pyspark import SparkFiles
from pyspark.sql import SparkSession


def add_class(session: SparkSession, name: str, source: str) -> Any:
    """Have the executors of `session` find the class `name` of `source`; the driver's own `Class` of it.

    Janino knows no generics in what a class implements. Raises what Java raises.
    """
    jvm: Any = session._jvm
    compiler = jvm.org.codehaus.janino.SimpleCompiler()
    # Where Spark has its connector, which --packages brings.
    compiler.setParentClassLoader(jvm.java.lang.Thread.currentThread().getContextClassLoader())
    compiler.cook(source)
    context: Any = session.sparkContext
    # Spark's own directory for what executors are given, which it removes when it stops.
    path = Path(SparkFiles.getRootDirectory()) / "kproxy" / f"{name}.jar"
    if path.name not in str(context._jsc.sc().listJars()):
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_jar(path, compiler.getBytecodes())
        context._jsc.addJar(str(path))
    return compiler.getClassLoader().loadClass(name)


def _write_jar(path: Path, bytecodes: Any) -> None:
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    with zipfile.ZipFile(unfinished, "w") as jar:
        for each in list(bytecodes.keySet()):
            jar.writestr(f"{str(each).replace('.', '/')}.class", bytes(bytecodes.get(each)))
    unfinished.replace(path)
