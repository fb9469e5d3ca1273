"""The APIs of the broker.

Each file opens with its APIs' versions and behaviour; `registry` lists them all.
"""
