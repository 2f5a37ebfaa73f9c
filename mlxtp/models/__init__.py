"""From the name of a model to its files on this disk."""
