"""The cache of hybrid models with state-space or linear-attention layers: slots of tokens, and states at some positions."""
