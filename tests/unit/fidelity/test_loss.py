from __future__ import annotations

import numpy as np
import pytest
import torch

from kvgraft.errors import ConfigError
from kvgraft.fidelity.control import Loss, LossKind

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
    logits = np.zeros((40, 1_000), np.float32)
    assert Loss.parse("greedy:32").evidence(logits).shape == (32,)
    assert Loss.parse("first_token").evidence(logits).shape == (1,)
    kept = Loss.parse("kl:1").evidence(logits)
    logits[:] = 1
    assert kept.shape == (1_000,)
    assert not kept.any()
