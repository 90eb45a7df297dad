"""The chat templates of families of models, each with its control tokens: published ones that come with trl, and
shortened ones in ``templates/``."""

from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from transformers import AddedToken, PreTrainedTokenizerFast

from tests.other_tokenizers import bpe_tokenizer
from whet.chat.renderer import Renderer

PUBLISHED = Path(str(distribution("trl").locate_file("trl/chat_templates")))  # an import would take long
_SHORTENED = Path(__file__).parent / "templates"
_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_LLAMA3 = tuple(
    f"<|{name}|>" for name in ("begin_of_text", "start_header_id", "end_header_id", "eot_id", "eom_id", "python_tag")
)
_DEEPSEEK = tuple(
    f"<｜{name}｜>"
    for name in (
        *("begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant", "tool▁calls▁begin", "tool▁calls▁end"),
        *("tool▁call▁begin", "tool▁call▁end", "tool▁sep", "tool▁outputs▁begin", "tool▁outputs▁end"),
        *("tool▁output▁begin", "tool▁output▁end"),
    )
)
_HARMONY = tuple(f"<|{name}|>" for name in ("start", "end", "message", "channel", "constrain", "call", "return"))
_KIMI = (
    *(f"<|im_{name}|>" for name in ("system", "user", "assistant", "middle", "end")),
    *(f"<|tool_calls_section_{name}|>" for name in ("begin", "end")),
    *(f"<|tool_call_{name}|>" for name in ("begin", "argument_begin", "end")),
)
_MISTRAL = (
    *("<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]"),
    *("[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[ARGS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[THINK]", "[/THINK]"),
)


@dataclass(frozen=True)
class Family:
    """A template, its special tokens (the first begins a text), other added tokens, and what the template does."""

    template: str
    special: tuple[str, ...]
    eos: str
    stops: tuple[str, ...]  # the tokens after which sampling stops
    added: tuple[str, ...] = ()
    thinks: bool = False
    drops: bool = False  # the template drops thoughts before the last question
    calls: int = 2  # most calls of a reply
    call_end: str = ""  # the end of a turn with calls, where it differs
    text_with_calls: bool = True
    arguments: dict[str, Any] = field(default_factory=dict)

    def tokenizer(self) -> PreTrainedTokenizerFast:
        tokenizer = bpe_tokenizer()
        tokenizer.add_special_tokens({"additional_special_tokens": list(self.special)})
        tokenizer.bos_token, tokenizer.eos_token = self.special[0], self.eos
        tokenizer.add_tokens([AddedToken(token, normalized=False) for token in self.added])
        folder = PUBLISHED if (PUBLISHED / f"{self.template}.jinja").exists() else _SHORTENED
        tokenizer.chat_template = (folder / f"{self.template}.jinja").read_text(encoding="utf-8")
        return tokenizer


_IM, _THINKS = ("<|im_end|>",), {"thinks": True, "drops": True}
FAMILIES = {
    "Qwen 3": Family("qwen3", _CHATML, "<|im_end|>", _IM, _TAGS, **_THINKS),
    "Qwen 3.5": Family("qwen3_5_think", _CHATML, "<|im_end|>", _IM, _TAGS, **_THINKS),
    "Nemotron 3": Family("nemotron_3_nano", _CHATML, "<|im_end|>", _IM, _TAGS, **_THINKS),
    "GLM 4.5": Family(
        "glm4moe",
        ("[gMASK]", "<sop>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        "<|endoftext|>",
        ("<|user|>", "<|endoftext|>", "<|observation|>"),
        (*_TAGS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        call_end="<|observation|>",
        **_THINKS,
    ),
    "gpt-oss": Family(
        "gptoss",
        ("<|startoftext|>", *_HARMONY),
        "<|return|>",
        ("<|return|>", "<|call|>"),
        calls=1,
        call_end="<|call|>",
        text_with_calls=False,
        **_THINKS,
    ),
    "Gemma 4": Family(
        "gemma4_v5",
        (
            *("<bos>", "<|turn>", "<turn|>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>"),
            *("<tool_response|>", '<|"|>', "<|channel>", "<channel|>", "<|think|>"),
        ),
        "<turn|>",
        ("<turn|>", "<|tool_response>"),
        call_end="<|tool_response>",
        arguments={"enable_thinking": True},
        **_THINKS,
    ),
    "Kimi K2": Family(
        "kimi_k2",
        ("[BOS]", "[EOS]", *_KIMI),
        "<|im_end|>",
        _IM,
        _TAGS[:2],
        **_THINKS,
    ),
    "MiniMax M2": Family(
        "minimax_m2", ("]~!b[", "]~b]", "[e~["), "[e~[", ("[e~[",),
        (*_TAGS[:2], "<minimax:tool_call>", "</minimax:tool_call>"), **_THINKS,
    ),
    "DeepSeek V3": Family("deepseek_v3", _DEEPSEEK, "<｜end▁of▁sentence｜>", ("<｜end▁of▁sentence｜>",), _TAGS[:2]),
    "DeepSeek V3.1": Family("deepseek_v31", _DEEPSEEK, "<｜end▁of▁sentence｜>", ("<｜end▁of▁sentence｜>",), _TAGS[:2]),
    "Mistral": Family("mistral", _MISTRAL, "</s>", ("</s>",), thinks=True),
    "Mistral with ids": Family("mistral_ids", _MISTRAL, "</s>", ("</s>",), text_with_calls=False),
    "Llama 3": Family(
        "llama3_2", _LLAMA3, "<|eot_id|>", ("<|eot_id|>",), calls=1, text_with_calls=False,
    ),
    "Llama 4": Family(
        "llama4", ("<|begin_of_text|>", "<|header_start|>", "<|header_end|>", "<|eot|>", "<|python_start|>",
                   "<|python_end|>"), "<|eot|>", ("<|eot|>",),
    ),
    "LFM 2": Family("lfm2_v2", (*_CHATML, "<|tool_call_start|>", "<|tool_call_end|>"), "<|im_end|>", _IM),
}  # fmt: skip


@cache
def renderer_of(name: str) -> Renderer:
    return Renderer(FAMILIES[name].tokenizer(), arguments=FAMILIES[name].arguments)
