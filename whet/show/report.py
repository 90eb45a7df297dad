"""``report.html``: a run on one self-contained page that needs no network or server.

It is generated from ``recipe.yaml``, ``metrics.jsonl`` and ``rollouts/`` of a run folder; only the metrics are
required.
"""

from pathlib import Path

from whet.base.errors import DataError
from whet.base.files import write_atomically
from whet.base.strict_json import JsonObject
from whet.show.charts import charts
from whet.show.history import History
from whet.show.overview import Overview
from whet.show.page import encode, page
from whet.show.rollouts import cards, sample_rollouts


def write_report(run_folder: Path, most_rollouts: int = 60) -> Path:
    """Write ``report.html`` to the run folder and return its path. Raises DataError without metrics."""
    run, path = run_data(run_folder, most_rollouts), run_folder / "report.html"
    write_atomically(path, page({"runs": [run]}, str(run["name"])).encode("utf-8", "replace"))
    return path


def run_data(run_folder: Path, most_rollouts: int = 60) -> JsonObject:
    """Return everything that a page shows of a run. Raises DataError without metrics."""
    history = History(run_folder)
    history.read()
    if not history.train.steps.size and not history.evaluations:
        raise DataError(f"no metrics in {history.path}: the run has completed no step, or has no jsonl sink")
    records = sample_rollouts(run_folder, most_rollouts)
    return Overview.of(run_folder).as_json(history) | {
        "charts": charts(history),
        "rollouts": cards(records, lambda card: len(encode(card))),
    }
