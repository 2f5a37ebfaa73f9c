"""Between text and tokens: templates, tokenizer, and an answer told apart into words, thoughts and calls."""
