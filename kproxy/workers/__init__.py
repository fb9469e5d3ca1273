"""Several processes that share one port, and one that looks after them.

`supervisor` starts them, replaces those that end and hands signals on; `child` is one of them as the supervisor sees
it, `worker` what runs in it; they talk over a `channel`. `pages` is the admin page of all.
"""
