"""Where the pages of an audit trail go: a topic, or files."""
