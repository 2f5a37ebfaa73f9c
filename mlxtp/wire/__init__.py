"""Bytes and messages: what travels between processes. Pure, except the two shells."""
