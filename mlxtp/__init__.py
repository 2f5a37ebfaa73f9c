"""Turns the Macs on one desk into one model server."""

__version__ = "0.1.0"
