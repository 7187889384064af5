"""From logits to a token: parameters, rules, grammars, and logprobs."""
