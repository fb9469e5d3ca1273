"""`kproxy pipeline ingest`: Structured Streaming to a topic.

The source is files, a Kafka topic or a counter; the records are written through the proxy.

As a library:

    from kproxy.pipeline.ingest.job import start
    from kproxy.pipeline.ingest.options import IngestOptions

    query = start(session, IngestOptions("csv:/data/in", topic="flights", checkpoint="/data/checkpoint"))

`options` has the options, `transforms` makes messages of rows (DataFrame to DataFrame), and `job` has `start` for
libraries and `run` for the command, with progress, metrics and an orderly end.
"""
