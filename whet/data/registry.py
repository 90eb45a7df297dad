"""The built-in kinds of rows by the name that recipes use. Only the chosen one is imported."""

ROWS = {
    "supervised": "whet.data.rows:SupervisedRows",
    "preference": "whet.data.rows:PreferenceRows",
    "labelled": "whet.data.rows:LabelledRows",
    "scored": "whet.data.rows:ScoredRows",
    "traces": "whet.tasks.traces:Traces",
}
