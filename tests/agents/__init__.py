"""Whole agents, as people start them, each with a home of its own."""
