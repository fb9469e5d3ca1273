"""Why a job ended, in one sentence that says what to do. Spark says it in hundreds of lines of Java."""

from __future__ import annotations

import re
from typing import Final

from kproxy.pipeline.ingest.options import FileSource, IngestOptions, KafkaSource
from kproxy.pipeline.ingest.sink import REFUSED
from kproxy.pipeline.spark import cause_in

_REFUSED: Final = re.compile(re.escape(REFUSED) + r"\|([^|]*)\|([^|]*)\|")
_RAISED: Final = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception|Failed): (.+)$", re.MULTILINE)
_REFUSALS: Final = {
    "corrupt": "it cannot be parsed",
    "no key": "its key is null",
    "no topic": "its topic is null or no name of a topic",
    "too large": "its message is larger than --max-message-bytes",
}


def why(error: BaseException, options: IngestOptions) -> str:
    """What a person is told; `error` is what the query ended with."""
    text = str(error)
    refused = _REFUSED.search(text)
    if refused is not None:
        reason = _REFUSALS.get(refused[1], refused[1])
        return (
            f"the row {refused[2]} cannot be written, as {reason}: give --dead-letters json:DIR (or topic:NAME) for "
            "such rows and start the job again, which writes this micro-batch again"
        )
    for pattern, sentence in _KNOWN:
        if re.search(pattern, text):
            return sentence.format(
                bootstrap=options.bootstrap,
                target=options.target,
                checkpoint=options.checkpoint,
                source=_source(options),
            )
    return _cause(text) or type(error).__name__


def _cause(text: str) -> str:
    """Java's innermost cause; else what Python raised in a micro-batch, which Java only quotes; else the first line."""
    raised = _RAISED.findall(text)
    return raised[-1].strip() if raised and "Caused by: " not in text else cause_in(text)


def _source(options: IngestOptions) -> str:
    source = options.source
    if isinstance(source, FileSource):
        return source.path
    return f"{source.topics} at {source.bootstrap}" if isinstance(source, KafkaSource) else "rate"


_KNOWN: Final = (
    (
        r"CSV header does not conform|enforceSchema",
        "a file in {source} has other columns in its header than the schema: give a --schema that fits, or take the "
        "file out (--source-option enforceSchema=true goes by position whatever the header says)",
    ),
    (
        r"RecordTooLargeException|MESSAGE_TOO_LARGE|record-too-large",
        "{target} takes no message as large as one of these: lower --max-message-bytes, with --dead-letters for what "
        "is larger, or raise the topic's max.message.bytes",
    ),
    (
        r"not present in metadata after|UnknownTopicOrPartitionException",
        "{target} cannot be reached through {bootstrap}: there is no such topic, or none of its owners answers",
    ),
    (
        r"TopicAuthorizationException|SaslAuthenticationException|ClusterAuthorizationException",
        "{bootstrap} does not let this job in: give what it wants with --kafka-option",
    ),
    (
        r"Expiring \d+ record|delivery timeout|TimeoutException.*(ms has passed|appending record)",
        "what was written was not acknowledged in time by {target} through {bootstrap}: start the job again when its "
        "brokers are back, nothing is lost",
    ),
    (
        r"Some data may have been lost|failOnDataLoss|OffsetOutOfRangeException|KAFKA_DATA_LOSS",
        "the source {source} no longer has what was to be read next (removed by retention, or the topic was made "
        "anew): give --source-option failOnDataLoss=false to go on without it",
    ),
    (
        r"CONCURRENT_STREAM_LOG_UPDATE|[Cc]oncurrent(ly)? (update|using)|Multiple streaming queries",
        "another run of this job uses the checkpoint {checkpoint}: end it first",
    ),
    (
        r"OutOfMemoryError|Java heap space",
        "Spark ran out of memory: make micro-batches smaller or give it more (--memory)",
    ),
)
