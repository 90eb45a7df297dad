"""The content of a message as clients and data sets write it: a text, or parts."""


def text_of(content: object) -> object:
    """Return the text of parts that are texts, and anything else as it is. Raises ``ValueError`` for other parts."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        text = part.get("text", part.get("refusal")) if isinstance(part, dict) else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise ValueError(f"must hold text only, not a part of type {kind!r}")
        texts.append(text)
    return "".join(texts)
