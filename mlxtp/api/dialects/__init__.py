"""The dialects of HTTP: each turns its own bodies into an `Ask`, and events into its own answers."""
