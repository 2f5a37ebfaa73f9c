"""Turns the Macs on one desk into one model server."""
