"""Text to tokens and back: templates, tokenizer, reasoning and tool calls. No HTTP.

Read `conversation` (the request), `tokenizer.Text` (a model's text) and `transcript` (tokens in, events out).
`renderer` runs files of the model, in a process of its own. `reasoning` separates thoughts,
text and `tool_calls`; `tool_grammar` writes grammars that force an answer. `replay` puts earlier answers in
prompts as the model wrote them.
"""
