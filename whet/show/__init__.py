"""The views of a run: live console, summary, report and viewer. They read the run folder. No lower room uses them."""
