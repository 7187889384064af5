"""What a card does: exactness, first tokens, decode steps beside repair, copies and captures. `run` arranges the parts."""
