"""Built-in generators by the name that recipes use."""

GENERATORS = {
    "torch": "whet.generators.torch_config:TorchGeneratorConfig",
    "vllm": "whet.generators.vllm_config:VllmGeneratorConfig",
    "router": "whet.generators.config:RouterConfig",
}
