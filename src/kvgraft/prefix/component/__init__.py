"""Trees with nodes that may hold something of a second pool besides their slots: what windows and states have in common."""
