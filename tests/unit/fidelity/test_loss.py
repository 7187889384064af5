from __future__ import annotations

import numpy as np
import pytest
import torch

from kvgraft.errors import ConfigError
from kvgraft.fidelity.control import AnswerPart, Loss, LossKind

FULL = np.array([[0.0, 2.0, 1.0], [3.0, 0.0, 0.0]])


@pytest.mark.parametrize("text", ["first_token", "kl:0.5", "kl:1", "kl:1e-05", "greedy:1", "greedy:32"])
def test_losses_are_read_as_they_are_written(text):
    assert str(Loss.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "kl",
        "kl:",
        "kl:0",
        "kl:-1",
        "kl:nan",
        "kl:1e999",
        "greedy",
        "greedy:0",
        "greedy:1.5",
        "greedy:9999",
        "first_token:2",
        "top1",
    ],
)
def test_others_are_refused_in_one_line(text):
    with pytest.raises(ConfigError, match="choose first_token, kl:KAPPA") as caught:
        Loss.parse(text)
    assert "\n" not in str(caught.value)


def test_what_they_compare():
    other_first, other_second = FULL.copy(), FULL.copy()
    other_first[0] = [2.0, 0.0, 1.0]
    other_second[1] = [0.0, 3.0, 0.0]
    for loss, losses in (
        (Loss.parse("first_token"), (0, 1, 0)),
        (Loss.parse("greedy:2"), (0, 1, 1)),
        (Loss.parse("greedy:1"), (0, 1, 0)),
    ):
        assert (
            tuple(loss.of(loss.evidence(FULL), loss.evidence(served)) for served in (FULL, other_first, other_second))
            == losses
        )


def test_kl_of_masked_tokens_is_of_the_others_and_of_no_distribution_is_a_whole_loss():
    loss = Loss.parse("kl:100")
    masked, other = np.array([[0.0, 1.0, -np.inf]]), np.array([[0.5, 1.0, -np.inf]])
    assert loss.of(masked, other) == pytest.approx(loss.of(masked[:, :2], other[:, :2]))
    assert loss.of(masked, other) > 0
    for broken in (np.full((1, 3), np.nan), np.array([[0.0, np.nan, 1.0]]), np.full((1, 3), -np.inf)):
        assert loss.of(FULL, broken) == 1.0
        assert loss.of(broken, FULL) == 1.0


def test_kl_is_torch_s_in_units_of_kappa_and_at_most_one():
    rng = np.random.default_rng(1)
    full, grafted = rng.normal(size=(2, 1, 50)).astype(np.float32)
    expected = torch.nn.functional.kl_div(
        torch.from_numpy(grafted).double().log_softmax(-1), torch.from_numpy(full).double().softmax(-1), reduction="sum"
    )
    assert compare(10.0, full, grafted) == pytest.approx(float(expected) / 10)
    assert compare(1e-3, full, grafted) == 1.0
    assert compare(1e-3, full, full) == 0.0


def compare(kappa, full, grafted):
    loss = Loss(LossKind.KL, kappa=kappa)
    return loss.of(loss.evidence(full), loss.evidence(grafted))


def test_evidence_is_small_and_its_own():
    logits = np.zeros((4, 1_000), np.float32)
    assert Loss.parse("greedy:32").evidence(logits).shape == (4,)
    kept = Loss.parse("kl:1").evidence(logits)
    logits[:] = 1
    assert kept.shape == (4, 1_000)
    assert not kept.any()


@pytest.mark.parametrize(
    ("text", "first", "later", "whole", "longest"),
    [
        ("first_token", [0], [1], [0], 2),
        ("kl:1", [0], [1], [0], 2),
        ("greedy:1", [0], [1], [0], 2),
        ("greedy:4", [0], [1, 2, 3], [0, 1, 2, 3], 4),
    ],
)
def test_parts_are_judged_by_tokens_of_their_own(text, first, later, whole, longest):
    """Each token that differs is a loss of the parts that it belongs to, and of no other."""
    loss = Loss.parse(text)
    assert loss.length(AnswerPart) == longest
    full = np.zeros((6, 3), np.float32)
    for token in range(6):
        served = full.copy()
        served[token] = [0.0, 9.0, 0.0]
        for part, tokens in zip(AnswerPart, (first, later, whole), strict=True):
            found = loss.of(loss.evidence(full), loss.evidence(served), part)
            assert (found > 0) == (token in tokens), (token, part)


def test_an_answer_that_ended_before_a_part_says_nothing_of_it():
    for loss in (Loss.parse("first_token"), Loss.parse("kl:1"), Loss.parse("greedy:4")):
        short, long = loss.evidence(FULL[:1]), loss.evidence(FULL)
        assert loss.of(long, short, AnswerPart.LATER) is None
        assert loss.of(short, long, AnswerPart.LATER) is None
        assert loss.of(long, short, AnswerPart.FIRST) == 0
