"""A request from its arguments to its output: prompts, documents, risk, text."""
