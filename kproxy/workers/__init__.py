"""Several proxy processes that share one port, and a supervisor.

`supervisor` starts them, replaces those that end and forwards signals. `process` is a worker as the supervisor sees it,
`worker` runs in it; they talk over a `channel`. `shares` divides quotas among the workers. `admin` is the admin
page of all workers.
"""
