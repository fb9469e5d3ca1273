"""Replication between reference brokers: the StreamBus text's engine, with leader epochs for truncation."""
