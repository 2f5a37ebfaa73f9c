"""HTTP: the OpenAI-compatible endpoint and everything that is text."""
