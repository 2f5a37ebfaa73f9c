"""Text to tokens and back: templates, tokenizers, reasoning and tool calls. No HTTP.

Read `conversation` (a request), `tokenizer.Text` (a model's text) and `transcript` (tokens in, events out).
"""
