"""What people look at: the live console, the summary, the report and the viewer. All of it reads files and facts of a
run; nothing below imports it."""
