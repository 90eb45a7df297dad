"""What a process holds before any model is there."""


def resident() -> int:
    """Bytes that this process holds once torch and transformers are imported: the part that no model explains. 0 where
    the system doesn't tell."""
    import transformers

    assert transformers.AutoModelForCausalLM, "imported when first used, and only then it counts"
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * 4096
    except OSError:
        return 0
