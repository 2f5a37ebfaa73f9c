"""The dialects of HTTP: each reads its bodies into a `GenerationRequest` and writes events as its answers.

`openai` is the shortest to read. `request_parts` is for several dialects.
"""
