"""`kproxy pipeline ingest`: Structured Streaming to a topic.

The source is files, a Kafka topic or a counter; the records are written through the proxy.

As a library:

    from kproxy.pipeline.ingest.options import FileSource, IngestOptions
    from kproxy.pipeline.ingest.job import start

    query = start(session, IngestOptions(FileSource("csv", "/data/in"), topic="flights", checkpoint="/data/checkpoint"))

`options` has the options, `job` starts the job, `transforms` makes messages of rows (DataFrame to DataFrame), and `run`
adds what the command needs: progress, metrics and an orderly end.
"""
