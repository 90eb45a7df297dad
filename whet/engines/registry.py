"""Built-in generators by their names in recipes."""

GENERATORS = {
    "torch": "whet.engines.torch.config:TorchGeneratorConfig",
    "vllm": "whet.engines.vllm.config:VllmGeneratorConfig",
}

GONE = {"router": "set the engine's replicas, as in {type: vllm, replicas: 2}"}
