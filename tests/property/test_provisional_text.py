"""What a client has of a stream with provisional tokens: whatever is drafted and taken back, it ends as the verified text."""

from __future__ import annotations

import copy
from types import SimpleNamespace

from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvgraft.engine.requests.request import StreamPart
from kvgraft.engine.requests.text import OutputText
from kvgraft.server.provisional import ProvisionalText

EOS = 0
TOKENS = [b"", b"a", b"b", b"ab", b"ba", b"\xc3", b"\xa4", b"\xe2\x82", b"\xac", b" a"]
"""Texts of token ids; some are parts of characters only."""
TOKEN = st.integers(1, len(TOKENS) - 1)
OVER = object()


class Bytes:
    """A tokenizer with `TOKENS` as its vocabulary."""

    def decode(self, token_ids, *, skip_special_tokens):
        return b"".join(TOKENS[token_id] for token_id in token_ids).decode("utf-8", "replace")

    def id_to_token(self, token_id):
        return str(token_id)


class Client:
    """Does as it is told: forgets the last characters, and adds text."""

    def __init__(self):
        self.shown = ProvisionalText()
        self.text = ""
        self.sent = 0
        self.void = 0
        self.tokens = 0

    def take(self, part):
        change = self.shown.take(part)
        assert 0 <= change.characters <= len(self.text)
        self.text = self.text[: len(self.text) - change.characters] + change.text
        self.sent += len(change.text)
        self.void += change.characters
        self.tokens += change.tokens


class Engine:
    """Draws a given answer, and before that drafts of it, by the rules of `StreamPart`."""

    def __init__(self, answer, stop):
        self.answer = answer
        self.true = OutputText(SimpleNamespace(backend_tokenizer=Bytes()), stop)
        self.forked = copy.deepcopy(self.true)
        self.num_verified = 0
        self.verified = ""
        self.drafts = []
        self.provisional = ""

    @property
    def is_done(self):
        return self.num_verified == len(self.answer) or self.true.stopped

    @property
    def may_draft(self):
        ended = EOS in self.drafts or self.forked.stopped
        return not ended and self.num_verified + len(self.drafts) < len(self.answer)

    def draft(self, is_right, other, num_dropped):
        """Draw one more draft, after taking some back."""
        num_dropped = min(num_dropped, len(self.drafts))
        if num_dropped:
            self.fork(self.drafts[: len(self.drafts) - num_dropped])
        if not self.may_draft:
            return None
        token_id = self.answer[self.num_verified + len(self.drafts)] if is_right else other
        text = self.push(self.forked, token_id, self.num_verified + len(self.drafts) + 1)
        self.drafts.append(token_id)
        self.provisional += text
        return StreamPart(text, token_id, is_provisional=True, num_retracted=num_dropped)

    def verify(self):
        """Draw the next token of the answer."""
        token_id = self.answer[self.num_verified]
        self.num_verified += 1
        text = self.push(self.true, token_id, self.num_verified)
        self.verified += text
        num_retracted = 0
        if self.drafts[:1] == [token_id]:
            del self.drafts[0]
        else:
            num_retracted = len(self.drafts)
            self.fork([])
        return StreamPart(text, token_id, OVER if self.is_done else None, num_retracted=num_retracted)

    def push(self, text, token_id, num_tokens):
        is_eos = token_id == EOS
        added = "" if is_eos else text.push(token_id)
        return added + text.flush() if is_eos or num_tokens == len(self.answer) else added

    def fork(self, drafts):
        self.forked, self.drafts, self.provisional = copy.deepcopy(self.true), [], self.verified
        for token_id in drafts:
            self.provisional += self.push(self.forked, token_id, self.num_verified + len(self.drafts) + 1)
            self.drafts.append(token_id)


DRAFTS = st.tuples(st.booleans(), st.one_of(st.just(EOS), TOKEN), st.sampled_from([0, 0, 0, 1, 2, 9]))


@st.composite
def answers(draw):
    token_ids = draw(st.lists(TOKEN, min_size=1, max_size=12))
    return [*token_ids, EOS] if draw(st.booleans()) else token_ids


@given(
    answers(),
    st.lists(st.sampled_from(["a", "ba", "aba", "ä", "€a"]), max_size=2),
    st.lists(st.one_of(st.none(), DRAFTS), max_size=40),
)
@example([1, 2, 1], ["aba"], [(True, 1, 0)] * 3)
@example([5, 6, 1], [], [(True, 1, 0), (False, 7, 0), None])
@settings(max_examples=400, deadline=None)
def test_the_client_ends_with_the_verified_text(answer, stop, actions):
    engine, client = Engine(answer, tuple(stop)), Client()
    for action in actions:
        part = None if engine.is_done else engine.verify() if action is None else engine.draft(*action)
        if part is not None:
            client.take(part)
            assert client.text == (engine.provisional if engine.drafts else engine.verified)
    while not engine.is_done:
        client.take(engine.verify())
    assert client.text == engine.verified == engine.true.text
    assert client.sent - client.void == len(client.text)


@given(answers(), st.lists(st.sampled_from(["a", "ba", "aba"]), max_size=2), st.lists(st.booleans(), max_size=40))
@settings(deadline=None)
def test_what_is_confirmed_is_sent_once(answer, stop, actions):
    engine, client = Engine(answer, tuple(stop)), Client()
    for is_draft in actions:
        part = None if engine.is_done else engine.draft(True, EOS, 0) if is_draft else engine.verify()
        if part is not None:
            client.take(part)
    while not engine.is_done:
        client.take(engine.verify())
    assert (client.void, client.tokens, client.sent) == (0, 0, len(engine.true.text))


@given(
    st.lists(
        st.builds(
            StreamPart,
            st.text("ab", max_size=3),
            st.integers(0, 1),
            is_provisional=st.booleans(),
            num_retracted=st.integers(0, 3),
        ),
        max_size=20,
    )
)
@settings(max_examples=300)
def test_an_engine_that_errs_about_provisional_text_harms_no_verified_text(parts):
    """Texts that do not fit their tokens, retractions of what was never sent: the verified text is still what is left."""
    client, verified, num_drafts = Client(), "", 0
    for part in parts:
        client.take(part)
        verified += "" if part.is_provisional else part.text
        num_drafts += part.is_provisional
        assert client.text.startswith(verified)
    client.take(StreamPart("a", 2, OVER))
    assert client.text == verified + "a"
    assert client.tokens <= num_drafts
