"""Replication between reference brokers.

The StreamBus text's engine, with leader epochs for truncation.
"""
