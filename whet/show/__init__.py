"""The views of a run: live console, summary, report and viewer. They read a run's files; nothing below imports them."""
