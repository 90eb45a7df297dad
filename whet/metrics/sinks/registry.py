"""The sinks that a recipe can name. Paths ("module:Class"), not classes: naming one imports nothing."""

SINKS: dict[str, str] = {
    "console": "whet.show.console:ConsoleSink",
    "jsonl": "whet.metrics.sinks.jsonl:JSONLSink",
    "tensorboard": "whet.metrics.sinks.tensorboard:TensorBoardSink",
    "wandb": "whet.metrics.sinks.wandb:WandbSink",
}
