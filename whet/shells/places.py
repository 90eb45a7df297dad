"""The built-in runtimes by their names in a recipe, and the folders and variables inside each; no heavy imports."""

from typing import Literal

WORK, TESTS, LOGS = "/work", "/tests", "/logs"
"""The folders of a runtime, empty at first: the work folder, where commands start, unless the task names another; for
tests, and for what tests report."""

ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "USER": "agent"}
"""All variables that a command is given, besides ``HOME``, the work folder."""

FILE_PROBLEM = 99  # the exit status of reading and writing where a file can't be read or written

Ending = Literal["exit", "time", "memory"]


RUNTIMES = {
    "container": "whet.shells.container:Container",
    "local": "whet.shells.local:Local",
    "remote": "whet.shells.remote:Remote",
}
