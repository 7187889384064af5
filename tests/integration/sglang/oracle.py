"""What any request must have been answered, from its report alone: copies are followed to the requests that computed them."""

from __future__ import annotations

from reference import Answer, Copied, Fresh, Reference


class Oracle:
    """Recomputes requests in transformers as their reports say that they were computed.

    Args:
        reference: The model.
        reports: By request id, as the server wrote them.
        prompts: By request id.
        outputs: By request id, as far as they are known.
    """

    def __init__(self, reference: Reference, reports, prompts, outputs):
        self._reference, self._reports = reference, reports
        self._prompts, self._outputs = prompts, outputs
        self._caches = {}

    def explains(self, rid, logprobs, tolerance=1e-4):
        """Tell whether the output of `rid` is the greedy continuation; ties within rounding may go either way.

        A retracted request goes on, behind the output that it had, from the K/V of its next attempt.
        """
        attempts = self._reports[rid]["attempts"]
        prompt, output = self._prompts[rid], self._outputs[rid]
        starts = [attempt["num_tokens"] - len(prompt) for attempt in attempts]
        stops = [*starts[1:], len(output)]
        for attempt, start, stop in zip(attempts, starts, stops, strict=True):
            if stop <= start:
                continue
            tokens = prompt + output[:start]
            want = self._reference.answer(self.parts(attempt, tokens), stop - start)
            if not self._agrees(want, output[start:stop], logprobs[start:stop], tolerance):
                return False
        return True

    def parts(self, attempt, tokens):
        """Computed and copied parts of a sequence."""
        parts, position = [], 0
        for span, source in zip(attempt["spans"], attempt["sources"], strict=True):
            start, length = span["target_start"], span["length"]
            donor, attempt_number, first = source["request"], source["attempt"], source["position"]
            known = self._tokens(donor, attempt_number)
            assert tokens[start : start + length] == known[first : first + length], "a copy of other tokens"
            cache = self._cache(donor, attempt_number)
            parts += [Fresh(tokens[position:start]), Copied(cache, first, length)]
            position = start + length
        return [*parts, Fresh(tokens[position:])]

    def _tokens(self, rid, number):
        """What is known of a request's text when the attempt of that number ended."""
        attempts = self._reports[rid]["attempts"] if rid in self._reports else []
        tokens = self._prompts[rid] + self._outputs.get(rid, [])
        return tokens[: attempts[number + 1]["num_tokens"]] if number + 1 < len(attempts) else tokens

    def _cache(self, rid, number):
        """K/V that an attempt computed."""
        if (rid, number) not in self._caches:
            attempts = self._reports[rid]["attempts"] if rid in self._reports else []
            # One that had not ended when the server did held no copies when its prompt became a donor.
            attempt = attempts[number] if number < len(attempts) else {"spans": [], "sources": []}
            self._caches[rid, number] = self._reference.cache_of(*self.parts(attempt, self._tokens(rid, number)))
        return self._caches[rid, number]

    @staticmethod
    def _agrees(want: Answer, tokens, logprobs, tolerance):
        for token, logprob, expected, expected_logprob in zip(
            tokens, logprobs, want.tokens, want.logprobs, strict=True
        ):
            if abs(logprob - expected_logprob) > tolerance:
                return False
            if token != expected:
                return True  # a tie: from here on the two went different ways
        return True
