"""Completions of a session → traces, under versioned rules: exact, accounted for, and rebuilt at will."""
