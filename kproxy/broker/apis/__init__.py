"""Handlers of the Kafka APIs that the broker offers.

The docstring of each file gives the versions and the behaviour of its APIs; `registry` lists all of them.
"""
