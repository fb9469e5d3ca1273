"""Coordinate consumer groups: `group` is one group, `journal` has its records, `coordinator` serves all groups."""
