"""What an agent reports of itself and the commands that it takes: snapshot, metrics, handlers."""
