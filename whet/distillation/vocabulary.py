"""The tokenizers of a run's models, and the comparison of their vocabularies. Each tokenizer is loaded once."""

from functools import lru_cache
from typing import TYPE_CHECKING

from whet.chat.renderer import Renderer
from whet.models.config import ModelConfig
from whet.models.loading import load_model_config, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def same_tokens(student: ModelConfig, teacher: ModelConfig) -> bool:
    """Return whether each token of the student is the same in the teacher, id by id. The teacher may have more
    tokens."""
    return _same(_plain(student), _plain(teacher))


def tokenizer_of(model: ModelConfig) -> "PreTrainedTokenizerBase":
    """Return the model's tokenizer. Raises ``WhetError`` if the model or its tokenizer doesn't exist."""
    return _tokenizer(_plain(model))


def renderer_of(model: ModelConfig, chat_template: str | None) -> Renderer:
    """Return a renderer with the chat template, by default the model's. Raises ``ConfigError`` if there is no usable
    one."""
    return _renderer(_plain(model), chat_template)


def rows_of(model: ModelConfig) -> int:
    """Return the number of rows of the model's output matrix, by its config."""
    return _rows(_plain(model))


def _plain(model: ModelConfig) -> ModelConfig:
    """Return only the settings that determine tokenizer and config."""
    return ModelConfig(path=model.path, revision=model.revision, trust_remote_code=model.trust_remote_code)


_tokenizer = lru_cache(maxsize=16)(load_tokenizer)


@lru_cache(maxsize=16)
def _rows(model: ModelConfig) -> int:
    return int(load_model_config(model).get_text_config().vocab_size)


@lru_cache(maxsize=16)
def _renderer(model: ModelConfig, chat_template: str | None) -> Renderer:
    return Renderer(_tokenizer(model), chat_template)


@lru_cache(maxsize=16)
def _same(student: ModelConfig, teacher: ModelConfig) -> bool:
    teacher_ids: dict[str, int] = _tokenizer(teacher).get_vocab()
    student_ids: dict[str, int] = _tokenizer(student).get_vocab()
    return all(teacher_ids.get(token) == index for token, index in student_ids.items())
