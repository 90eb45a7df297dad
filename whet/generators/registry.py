"""Built-in generators by the name that recipes use."""

GENERATORS = {
    "torch": "whet.generators.torch_config:TorchGeneratorConfig",
    "vllm": "whet.generators.vllm_config:VllmGeneratorConfig",
}

GONE = {"router": "set replicas of the engine itself, as in {type: vllm, replicas: 2}"}
