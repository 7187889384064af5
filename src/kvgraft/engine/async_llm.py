"""The engine behind asyncio: one thread runs the model, callers stream from it."""
