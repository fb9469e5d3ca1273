"""Write rows to a topic with Spark's Structured Streaming: the command `kproxy pipeline ingest`.

Sources are files, topics, a counter, others of Spark's, or a program's rows; records are written through the proxy.

`options` has the options, `transforms` makes messages of rows (DataFrame to DataFrame), and `job` has `start` for
libraries and `run` for the command, with progress, metrics and an orderly end.
"""
