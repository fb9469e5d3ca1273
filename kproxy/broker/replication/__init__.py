"""Replicate partitions between reference brokers, with in-sync replicas and a high watermark.

The package follows the replication of the StreamBus text, but truncates logs by leader epochs.
"""
