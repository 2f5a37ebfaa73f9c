"""Text to tokens and back: templates, tokenizer, reasoning and tool calls. No HTTP.

Read `conversation` (the request), `tokenizer.Text` (a model's text) and `transcript` (tokens in, events out).
"""
