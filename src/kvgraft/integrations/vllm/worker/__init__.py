"""The half of the connector beside the model, on each rank: K/V, no decisions about what is reused.

Public modules: `text_reader`.
"""
