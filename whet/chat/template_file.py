"""The setting ``chat_template``: the text of a template, the name of a built-in one, or a file."""

from typing import Annotated

from pydantic import AfterValidator

from whet.base.files import expanded

_ENDINGS = (".jinja", ".jinja2", ".j2", ".txt")


def read_template(template: str) -> str:
    """Return the text of a template that is given as a file, so that a run doesn't depend on the file later; other
    texts unchanged. Raises ``ValueError`` for a file that can't be read."""
    if "\n" in template or "{" in template or not template.endswith(_ENDINGS):
        return template
    path = expanded(template)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ValueError(f"the chat template {path} can't be read: {reason}") from None


ChatTemplate = Annotated[str, AfterValidator(read_template)]
