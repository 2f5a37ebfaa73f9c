"""Reports of an agent about itself, and its commands: snapshot, metrics, handlers."""
