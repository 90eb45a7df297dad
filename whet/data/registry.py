"""The built-in kinds of rows by the name that recipes use. Only the chosen one is imported."""

ROWS = {
    "supervised": "whet.data.examples:SupervisedRows",
    "preference": "whet.data.examples:PreferenceRows",
    "labelled": "whet.data.examples:LabelledRows",
    "scored": "whet.data.examples:ScoredRows",
}
