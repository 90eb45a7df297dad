"""The tokenizers of the models of a run, and whether one model reads what another one writes. Each is loaded once."""

from functools import lru_cache
from typing import Any

from whet.chat.renderer import Renderer
from whet.models.config import ModelConfig
from whet.models.loading import load_tokenizer


def same_tokens(student: ModelConfig, teacher: ModelConfig) -> bool:
    """Whether each token of the student is the same in the teacher, id by id. The teacher may know more of them."""
    return _same(_plain(student), _plain(teacher))


def tokenizer_of(model: ModelConfig) -> Any:
    """The model's tokenizer. Raises ``WhetError`` where there is no such model or it has none."""
    return _tokenizer(_plain(model))


def renderer_of(model: ModelConfig, chat_template: str | None) -> Renderer:
    """The same with the chat template, or else its own. Raises ``ConfigError`` where neither serves."""
    return _renderer(_plain(model), chat_template)


def _plain(model: ModelConfig) -> ModelConfig:
    """What decides about the tokenizer."""
    return ModelConfig(path=model.path, revision=model.revision, trust_remote_code=model.trust_remote_code)


_tokenizer = lru_cache(maxsize=16)(load_tokenizer)


@lru_cache(maxsize=16)
def _renderer(model: ModelConfig, chat_template: str | None) -> Renderer:
    return Renderer(_tokenizer(model), chat_template)


@lru_cache(maxsize=16)
def _same(student: ModelConfig, teacher: ModelConfig) -> bool:
    known: dict[str, int] = _tokenizer(teacher).get_vocab()
    own: dict[str, int] = _tokenizer(student).get_vocab()
    return all(known.get(token) == index for token, index in own.items())
