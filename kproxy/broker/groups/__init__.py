"""Coordinate consumer groups: `group` is the state of one, `journal` its records, `coordinator` serves all groups."""
