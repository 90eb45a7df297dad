"""The engines that a recipe can name, offered by whet and by other installed distributions."""

from whet.config.entry_points import EntryPoints

GENERATORS = EntryPoints("whet.engines")

GONE = {"router": "set the engine's replicas, as in {type: vllm, replicas: 2}"}
