"""HTTP: the OpenAI-compatible endpoint and all text processing of requests and answers."""
