"""Replication of partitions between reference brokers: the StreamBus text's engine, with leader epochs for truncation."""
