from __future__ import annotations

import pytest
from tests.unit.observability.records import make_record, make_step

from kvgraft.observability import IdleRecord, NullRecorder, Recorders


class Kept(NullRecorder):
    def __init__(self):
        self.records = []

    def record_request(self, record):
        self.records.append(record)

    record_step = record_idle = record_request


class Broken(NullRecorder):
    def record_request(self, record):
        raise ValueError("no disk")

    record_step = record_idle = record_request


def tell_all(recorder):
    """Tell one record of each kind; returns them."""
    told = [make_record(), make_step(), IdleRecord("heal", 1.0, 0.5)]
    for record, method in zip(told, (recorder.record_request, recorder.record_step, recorder.record_idle), strict=True):
        method(record)
    return told


def test_recorders_are_told_the_same():
    first, second = Kept(), Kept()
    assert tell_all(Recorders([first, second])) == first.records == second.records


def test_recorder_that_fails_keeps_nothing_from_the_others():
    kept = Kept()
    recorders = Recorders([Broken(), kept])
    for method, record in ((recorders.record_request, make_record()), (recorders.record_step, make_step())):
        with pytest.raises(ValueError, match="no disk"):
            method(record)
    assert kept.records == [make_record(), make_step()]
