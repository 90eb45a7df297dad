"""Built-in generators by the name that recipes use."""

GENERATORS = {
    "torch": "whet.engines.torch.config:TorchGeneratorConfig",
    "vllm": "whet.engines.vllm.config:VllmGeneratorConfig",
}

GONE = {"router": "set replicas of the engine itself, as in {type: vllm, replicas: 2}"}
