"""The dialects of HTTP: each reads its bodies into a `GenerationRequest` and writes events as its answers."""
