"""Uploads an exported model to the Hugging Face Hub (``HF_ENDPOINT``, ``HF_TOKEN`` or ``hf auth login``)."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from whet.base.errors import ConfigError, WhetError
from whet.fetch.download import offline

_NAME = re.compile(r"[A-Za-z0-9][\w.\-]*/[A-Za-z0-9][\w.\-]*")
_KEPT = ["lineage.json"]  # it names folders of this machine; the model card has the same history without them


def check_push(name: str) -> None:
    """Raise ``WhetError`` if no model could be uploaded under this name: it is not valid, downloads are switched off,
    or the Hub doesn't answer or refuses the token."""
    from huggingface_hub import HfApi, get_token

    if not _NAME.fullmatch(name):
        raise ConfigError(f"--push {name}: expected USER/NAME, as in someone/my-model")
    if offline():
        raise ConfigError(f"--push {name}: HF_HUB_OFFLINE forbids to use the Hub; unset it")
    if get_token() is None:
        raise ConfigError(f"--push {name}: no Hugging Face token; run `hf auth login`, or set HF_TOKEN")
    with _plain_errors(name):
        HfApi().whoami()


def push(folder: Path, name: str, message: str, *, private: bool = False) -> str:
    """Upload a folder as the model ``name``, which is created if necessary, and return its address. Raises
    ``WhetError`` if that fails, and for a repository that exists and is public although ``private`` is asked for."""
    from huggingface_hub import HfApi

    api = HfApi()
    with _plain_errors(name):
        url = api.create_repo(name, private=private or None, exist_ok=True)
        if private and not api.repo_info(name).private:
            raise WhetError(f"--push {name}: it exists and is public, so --private can't be kept; choose another name")
        api.upload_folder(repo_id=name, folder_path=folder, commit_message=message, ignore_patterns=list(_KEPT))
    return str(url)


@contextmanager
def _plain_errors(name: str) -> Iterator[None]:
    """Turn errors of the Hub's client, of many types, into one line."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except WhetError:
        raise
    except HfHubHTTPError as error:
        status = error.response.status_code
        advice = {
            401: "the token is not valid; run `hf auth login`, or set HF_TOKEN",
            403: "the token may not write there; check its permissions and the user or organization in the name",
        }
        text = advice.get(status, (error.server_message or str(error)).strip().partition("\n")[0])
        raise WhetError(f"--push {name}: the Hub answered with {status}: {text}") from error
    except Exception as error:
        text = str(error).strip().partition("\n")[0]
        raise WhetError(f"--push {name}: the Hub can't be reached ({type(error).__name__}: {text})") from error
