"""The timestamps of a source's records, kept on those that are written.

Spark's Kafka sink has no column for them. kafka-clients lets an interceptor set them, which is a class of Java
(`compiled`). A timestamp goes to it in a header, which it takes away.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import SparkSession

from kproxy.pipeline.ingest.compiled import add_class
from kproxy.pipeline.spark import as_spark_failure

# Its value is the timestamp in milliseconds, in decimal.
HEADER: Final = "_kproxy_timestamp"
_PACKAGE: Final = "kproxy"
_CLASS: Final = "KeepTimestamps"
CLASS_NAME: Final = f"{_PACKAGE}.{_CLASS}"
# Kafka's negative timestamp says that there is none.
_SOURCE: Final = f"""
package {_PACKAGE};

import org.apache.kafka.clients.producer.ProducerInterceptor;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.header.Header;

public class {_CLASS} implements ProducerInterceptor {{
    public void configure(java.util.Map settings) {{}}

    public void close() {{}}

    public void onAcknowledgement(RecordMetadata metadata, Exception error) {{}}

    public ProducerRecord onSend(ProducerRecord record) {{
        Header told = record.headers().lastHeader("{HEADER}");
        if (told == null) {{
            return record;
        }}
        long timestamp = Long.parseLong(new String(told.value()));
        record.headers().remove("{HEADER}");
        if (timestamp < 0) {{
            return record;
        }}
        Long kept = Long.valueOf(timestamp);
        return new ProducerRecord(
            record.topic(), record.partition(), kept, record.key(), record.value(), record.headers());
    }}
}}
"""


def add_interceptor(session: SparkSession) -> None:
    """Have the executors of `session` find CLASS_NAME. Raises SparkFailed."""
    with as_spark_failure("The interceptor that keeps timestamps was not taken"):
        add_class(session, CLASS_NAME, _SOURCE)
