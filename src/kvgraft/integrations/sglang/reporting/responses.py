"""Reports in answers of SGLang, in `meta_info["kvgraft"]` of `/generate`; text is registered once an answer is sent."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvgraft.integrations.sglang.reporting.reports import RequestLog


@cache
def reporting(streamer_class: type[Any]) -> type[Any]:
    """Derive an output streamer that adds a request's report to its last piece of output, and registers donors after it."""

    class ReportingOutputStreamer(streamer_class):  # type: ignore[misc]
        """Needs a `GraftRadixCache` as `tree_cache`."""

        __slots__ = ()
        has_additional_customized_info = True

        def stream_output(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
            """Send the output of a step; only then is its text made a donor."""
            super().stream_output(*args, **kwargs)
            reuse = getattr(self.tree_cache, "reuse", None)
            if reuse is not None:
                reuse.publishing.settle()

        def should_build_additional_customized_info(self) -> bool:
            """Only where a request has ended; tokens on the way carry nothing more than before."""
            log = _log(self.tree_cache)
            return log is not None and log.has_pending

        def build_additional_customized_info(self, reqs: list[Any]) -> dict[str, list[Any]]:
            """Return one list per request: its report, or nothing."""
            fields: dict[str, list[Any]] = super().build_additional_customized_info(reqs)
            log = _log(self.tree_cache)
            reports = [None if log is None else log.take(req) for req in reqs]
            return {**fields, "kvgraft": [[] if report is None else [report] for report in reports]}

    return ReportingOutputStreamer


def _log(tree_cache: Any) -> RequestLog | None:  # noqa: ANN401
    reuse = getattr(tree_cache, "reuse", None)
    return None if reuse is None else reuse.books.log
