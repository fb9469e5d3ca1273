"""Explain in one sentence why a job ended and what to do. Spark's own text is hundreds of lines of Java."""

from __future__ import annotations

import re
from typing import Final

from kproxy.pipeline.ingest.options import FileSource, IngestOptions, KafkaSource
from kproxy.pipeline.ingest.sink import NEW_IN_FILE, REFUSED
from kproxy.pipeline.spark import cause_in

_REFUSED: Final = re.compile(re.escape(REFUSED) + r"\|([^|]*)\|([^|]*)\|(?:([^|]*)\|)?")
_RAISED: Final = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception|Failed): (.+)$", re.MULTILINE)
_WITH_NEW_COLUMNS: Final = (
    "give a --schema that has it, or --on-new-columns dead-letter (or ignore), and start the job again, which writes "
    "this micro-batch again"
)
_WITH_NEW_FILES: Final = (
    "give a --schema that has them, or --on-new-columns ignore to leave them out, and start the job again"
)
_REFUSALS: Final = {
    "corrupt": "it cannot be parsed",
    "new column": "it has what the schema lacks ({names})",
    "not finite": "a number of it is NaN or infinite, which JSON has no number for (--not-finite text writes its name)",
    "no key": "its key is null",
    "no topic": "its topic is null or no name of a topic",
    "too large": "its message is larger than --max-message-bytes",
}


def why(error: BaseException, options: IngestOptions) -> str:
    """Return the sentence for the user; `error` is the one that the query ended with."""
    text = str(error)
    refused = _REFUSED.search(text)
    if refused is not None:
        reason = _REFUSALS.get(refused[1], refused[1]).format(names=refused[3])
        if refused[1] == NEW_IN_FILE:
            return f"the file {refused[2]} has columns that the schema lacks ({refused[3]}): {_WITH_NEW_FILES}"
        if refused[1] == "new column" and options.on_new_columns == "fail":
            return f"the row {refused[2]} cannot be written, as {reason}: {_WITH_NEW_COLUMNS}"
        return (
            f"the row {refused[2]} cannot be written, as {reason}: give --dead-letters json:DIR (or topic:NAME) for "
            "such rows and start the job again, which writes this micro-batch again"
        )
    for pattern, sentence in _KNOWN:
        found = re.search(pattern, text)
        if found is not None:
            return sentence.format(
                **found.groupdict(),
                bootstrap=options.bootstrap,
                target=options.target,
                checkpoint=options.checkpoint,
                source=_source(options),
            )
    return _cause(text) or type(error).__name__


def _cause(text: str) -> str:
    """Return Java's innermost cause, else the Python error of a micro-batch that Java quotes, else the first line."""
    raised = _RAISED.findall(text)
    return raised[-1].strip() if raised and "Caused by: " not in text else cause_in(text)


def _source(options: IngestOptions) -> str:
    source = options.source
    if isinstance(source, FileSource):
        return source.path
    return f"{source.topics} at {source.bootstrap}" if isinstance(source, KafkaSource) else "rate"


_KNOWN: Final = (
    (
        r"(?:CSV header does not conform|Number of column in CSV header)[^\t]*CSV file: (?P<file>.*)",
        "the header of {file} does not name the columns of the schema in their order: where all files to come are like "
        "it, start the job again with a --schema that fits; else move it to where a job of its own reads, or go by "
        "position whatever headers say with --source-option enforceSchema=true (a file that is not UTF-8 wants "
        "--source-option encoding=NAME)",
    ),
    (
        r"MALFORMED_CHARACTER_CODING",
        "a file in {source} is not in the encoding that --source-option encoding names (UTF-16 with a document on each "
        "line wants its byte order and line end: encoding=UTF-16LE and lineSep=$'\\n')",
    ),
    (
        r"RecordTooLargeException|MESSAGE_TOO_LARGE|record-too-large",
        "{target} takes no message as large as one of these: lower --max-message-bytes, with --dead-letters for what "
        "is larger, or raise the topic's max.message.bytes",
    ),
    (
        r"Partition \d+ of topic \S+ with partition count \d+ is not present",
        "{target} has fewer partitions than {source}: add some, or start the job without --keep-partitions",
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
