"""The built-in runtimes: their names in a recipe, and their classes."""

RUNTIMES = {
    "container": "whet.shells.container:Container",
    "local": "whet.shells.local:Local",
    "remote": "whet.shells.remote:Remote",
}
