"""`kproxy pipeline ingest`: Structured Streaming from files, a Kafka topic or a counter to a topic, through the proxy.

As a library:

    from kproxy.pipeline.ingest.options import FileSource, IngestOptions
    from kproxy.pipeline.ingest.job import start

    query = start(session, IngestOptions(FileSource("csv", "/data/in"), topic="flights", checkpoint="/data/checkpoint"))

`options` says what can be asked for, `job` starts it, `transforms` is what becomes of the rows (DataFrame to
DataFrame), `run` is what the command adds: progress, metrics and an orderly end.
"""
