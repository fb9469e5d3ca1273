"""Consumer groups: the state of one group, its journal, and the coordinator of many."""
