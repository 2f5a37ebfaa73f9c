"""Programs of others against the HTTP side, above a scripted engine."""
