"""What happens where answers leave SGLang."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvgraft.integrations.sglang.reporting.responses import reporting


class Streamer:
    """The part of SGLang's output streamer that is derived from."""

    def __init__(self, reuse, events):
        self.tree_cache, self.events = SimpleNamespace(reuse=reuse), events

    def stream_output(self, reqs, return_logprob, skip_req=None):
        self.events.append(("sent", reqs, return_logprob, skip_req))


def test_text_becomes_a_donor_behind_the_tokens_of_its_step():
    events = []
    reuse = SimpleNamespace(publishing=SimpleNamespace(settle=lambda: events.append("settled")))
    reporting(Streamer)(reuse, events).stream_output(["a request"], False, skip_req="another")
    assert events == [("sent", ["a request"], False, "another"), "settled"]


def test_nothing_is_made_of_what_could_not_be_sent():
    class Broken(Streamer):
        def stream_output(self, *_args, **_kwargs):
            raise ConnectionError("nobody listens")

    reuse = SimpleNamespace(publishing=SimpleNamespace(settle=lambda: pytest.fail("settled")))
    with pytest.raises(ConnectionError):
        reporting(Broken)(reuse, []).stream_output([], False)


def test_server_that_reuses_nothing_sends_as_ever():
    events = []
    reporting(Streamer)(None, events).stream_output([], True)
    assert events == [("sent", [], True, None)]
