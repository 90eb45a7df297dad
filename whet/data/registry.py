"""The built-in kinds of rows by the name that recipes use. Only the chosen one is imported."""

ROWS = {
    "supervised": "whet.data.rows:SupervisedRows",
    "preference": "whet.data.rows:PreferenceRows",
    "labelled": "whet.data.rows:LabelledRows",
    "scored": "whet.data.rows:ScoredRows",
    "alpaca": "whet.data.published:ALPACA",
    "dolly": "whet.data.published:DOLLY",
    "openmathinstruct2": "whet.data.published:OPEN_MATH_INSTRUCT_2",
    "numinamath_cot": "whet.data.published:NUMINA_MATH_COT",
    "tulu3_sft": "whet.data.published:TULU_3_SFT",
    "ultrachat": "whet.data.published:ULTRACHAT",
    "hh": "whet.data.published:HH",
    "helpsteer3": "whet.data.published:HelpSteer3Rows",
    "tulu3_preference": "whet.data.published:TULU_3_PREFERENCE",
    "ultrafeedback": "whet.data.published:ULTRAFEEDBACK",
    "traces": "whet.tasks.traces:Traces",
}
