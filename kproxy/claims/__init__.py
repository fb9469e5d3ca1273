"""Single reader/writer: the Own API, as the Kafka wiki's "Single Reader/Writer" proposes it, fenced to the broker.

`rules` decides what a claim comes to, `table` is what etcd says of all claims, `service` claims for connections of this
process, and confirms what others claimed; `clients` is for applications.
"""
