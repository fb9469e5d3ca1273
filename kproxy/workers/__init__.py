"""Run several proxy processes that share one port, under a supervisor.

`supervisor` starts them, replaces those that end and forwards signals. `process` is the supervisor's side of a worker
and `worker` the worker's own; both exchange messages over a `channel`. `shares` divides quotas among the workers.
`pages` is the admin page of all workers.
"""
