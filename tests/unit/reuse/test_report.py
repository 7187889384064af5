from __future__ import annotations

import json
import math

import numpy as np

from kvgraft.reuse.report import report_as_dict
from kvgraft.types import DonorId, Fidelity, GraftReport, Miss, MissReason, SpanReport


def test_report_is_plain_json():
    span = SpanReport(np.int64(5), np.int64(7), DonorId(3), np.int64(1), np.int64(4), Fidelity.SHIFTED, 1)
    report = GraftReport(
        np.int64(20),
        exact_tokens=np.int64(2),
        shifted_tokens=np.int64(7),
        spans=(span,),
        timings_ms={"lookup": np.float64(0.5), "graft": math.nan},
        miss=Miss(MissReason.NO_ROOM, "full"),
        full_flops=math.inf,
    )
    told = json.loads(json.dumps(report_as_dict(report), allow_nan=False))
    assert (told["num_tokens"], told["reused_tokens"], told["num_donors"]) == (20, 9, 1)
    assert told["miss"] == {"reason": "no_room", "detail": "full"}
    assert told["timings_ms"] == {"lookup": 0.5, "graft": None}
    assert told["full_flops"] is None
    assert told["spans"] == [
        {
            "target_start": 5,
            "length": 7,
            "donor_id": 3,
            "donor_start": 1,
            "position_delta": 4,
            "fidelity": "shifted",
            "generation": 1,
        }
    ]


def test_every_field_of_the_report_is_told():
    report = GraftReport(1)
    assert set(GraftReport.__dataclass_fields__) <= set(report_as_dict(report))
