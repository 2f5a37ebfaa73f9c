"""Text to tokens and back: templates, tokenizer, reasoning and tool calls. No HTTP."""
