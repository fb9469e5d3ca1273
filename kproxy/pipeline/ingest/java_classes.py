"""Compile Java classes for a job and send them to the executors.

Spark has a compiler for its own code (Janino), so neither a JDK nor a build is needed. There are two classes:

1. A producer interceptor that keeps the timestamps of a source's records. Spark's Kafka sink has no column for them.
   The timestamp travels in a header, which the interceptor removes.
2. A SQL function that returns the texts of JSON documents as they are in the source. Spark's own JSON functions parse
   numbers with a fraction as doubles and so change their text. The function asks Jackson, which Spark's functions use,
   where each document begins and ends.
"""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any, Final

from pyspark import SparkFiles
from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation uses
from pyspark.sql.types import ArrayType, StringType

from kproxy.pipeline.spark import as_spark_failure


def add_class(session: SparkSession, name: str, source: str) -> Any:
    """Compile `source`, send the class `name` to the executors, and return the driver's `Class` of it.

    Janino does not support generics in implemented interfaces. Errors are Java's own.
    """
    jvm: Any = session._jvm
    compiler = jvm.org.codehaus.janino.SimpleCompiler()
    # This loader has Spark's Kafka connector, which --packages adds.
    compiler.setParentClassLoader(jvm.java.lang.Thread.currentThread().getContextClassLoader())
    compiler.cook(source)
    context: Any = session.sparkContext
    # Spark's directory of files for executors; Spark removes it when it stops.
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


# The header's value is the timestamp in milliseconds, in decimal.
TIMESTAMP_HEADER: Final = "_kproxy_timestamp"
_PACKAGE: Final = "kproxy"
_TIMESTAMPS_CLASS: Final = "KeepTimestamps"
INTERCEPTOR_CLASS: Final = f"{_PACKAGE}.{_TIMESTAMPS_CLASS}"
# In Kafka a negative timestamp means none.
_TIMESTAMPS_SOURCE: Final = f"""
package {_PACKAGE};

import org.apache.kafka.clients.producer.ProducerInterceptor;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.header.Header;

public class {_TIMESTAMPS_CLASS} implements ProducerInterceptor {{
    public void configure(java.util.Map settings) {{}}

    public void close() {{}}

    public void onAcknowledgement(RecordMetadata metadata, Exception error) {{}}

    public ProducerRecord onSend(ProducerRecord record) {{
        Header told = record.headers().lastHeader("{TIMESTAMP_HEADER}");
        if (told == null) {{
            return record;
        }}
        long timestamp = Long.parseLong(new String(told.value()));
        record.headers().remove("{TIMESTAMP_HEADER}");
        if (timestamp < 0) {{
            return record;
        }}
        Long kept = Long.valueOf(timestamp);
        return new ProducerRecord(
            record.topic(), record.partition(), kept, record.key(), record.value(), record.headers());
    }}
}}
"""


def add_timestamp_interceptor(session: SparkSession) -> None:
    """Make INTERCEPTOR_CLASS available to the executors of `session`. Raise SparkFailed if that fails."""
    with as_spark_failure("The interceptor that keeps timestamps was not taken"):
        add_class(session, INTERCEPTOR_CLASS, _TIMESTAMPS_SOURCE)


_FUNCTION: Final = "kproxy_documents"
_DOCUMENTS_CLASS: Final = "Documents"
_DOCUMENTS_SOURCE: Final = f"""
package {_PACKAGE};

import com.fasterxml.jackson.core.JsonFactory;
import com.fasterxml.jackson.core.JsonParser;
import com.fasterxml.jackson.core.JsonProcessingException;
import com.fasterxml.jackson.core.JsonToken;
import java.util.ArrayList;
import java.util.List;
import org.apache.spark.sql.api.java.UDF1;

public class {_DOCUMENTS_CLASS} implements UDF1 {{
    private static final JsonFactory FACTORY = new JsonFactory();

    public Object call(Object given) throws Exception {{
        if (given == null) {{
            return null;
        }}
        String text = (String) given;
        JsonParser parser = FACTORY.createParser(text);
        try {{
            parser.configure(JsonParser.Feature.STRICT_DUPLICATE_DETECTION, true);
            return documents(parser, text);
        }} catch (JsonProcessingException noJson) {{
            return null;
        }} finally {{
            parser.close();
        }}
    }}

    private static List documents(JsonParser parser, String text) throws Exception {{
        List found = new ArrayList();
        JsonToken token = parser.nextToken();
        boolean several = token == JsonToken.START_ARRAY;
        if (several) {{
            token = parser.nextToken();
        }}
        while (token == JsonToken.START_OBJECT && (several || found.isEmpty())) {{
            int begin = (int) parser.currentTokenLocation().getCharOffset();
            parser.skipChildren();
            int end = (int) parser.currentLocation().getCharOffset();
            found.add(text.substring(begin, end));
            token = parser.nextToken();
        }}
        if (several && token == JsonToken.END_ARRAY) {{
            token = parser.nextToken();
            several = false;
        }}
        return token == null && !several ? found : null;
    }}
}}
"""


def add_documents_function(session: SparkSession) -> None:
    """Register the function of `documents_in` in `session` and its later clones. Raise SparkFailed if that fails."""
    with as_spark_failure("The function that finds JSON documents was not taken"):
        spark: Any = session._jsparkSession
        found = add_class(session, f"{_PACKAGE}.{_DOCUMENTS_CLASS}", _DOCUMENTS_SOURCE).newInstance()
        spark.udf().register(_FUNCTION, found, spark.parseDataType(ArrayType(StringType()).json()))


def documents_in(text: Column) -> Column:
    """Return the text of the document, or of each document in an array.

    The result is null for text that is not JSON by RFC 8259, for an element that is not an object, for text after the
    document, and for a field that occurs twice at any depth.
    """
    return F.call_function(_FUNCTION, text)
