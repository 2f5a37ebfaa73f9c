"""Addresses at which other Macs may be: hints, never membership."""
