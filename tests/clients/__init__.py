"""Real client libraries against live ranks."""
