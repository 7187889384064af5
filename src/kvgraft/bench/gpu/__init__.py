"""What a card does: exactness, first tokens, decode steps beside repair, copies and captures. `run` arranges the parts.

Public modules: `capture`, `card`, `copies`, `decode_step`, `exactness`, `first_token`, `record`, `run`, `subject`.
"""
