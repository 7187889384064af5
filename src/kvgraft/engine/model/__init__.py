"""A transformers decoder as the engine runs it: loading, masks, RoPE, layers, and checks of the model."""
