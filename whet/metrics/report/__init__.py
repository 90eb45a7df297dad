"""``report.html``: a run on one page that opens anywhere. All of it is in the file: no network, no server."""

from whet.metrics.report.page import write_report

__all__ = ["write_report"]
