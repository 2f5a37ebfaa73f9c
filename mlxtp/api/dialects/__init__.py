"""The dialects of HTTP: each turns its own bodies into a `GenerationRequest`, and events into its own
answers.
"""
