"""Builds, tokenises and grades questions over documents of about N tokens, and prints what that took:
``python -m tests.tasks.long_texts N``."""

import asyncio
import json
import resource
import sys

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from whet.chat.renderer import Renderer
from whet.tasks.long_context import LongContext


def long_context(words: int, **settings: int) -> LongContext:
    return LongContext(kinds=("chain", "comparison", "count"), words=words, **settings)


def word_pieces() -> PreTrainedTokenizerFast:
    """Byte-level BPE learned from a text of the task set: about 1.3 tokens a word, as in published tokenizers."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    sample = long_context(5000, train_size=1, test_size=0).tasks("train")[0]
    tokenizer.train_from_iterator([str(sample.prompt[0]["content"])], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def main(tokens: int) -> None:
    renderer = Renderer(word_pieces(), chat_template="plain")
    before = resource.getrusage(resource.RUSAGE_SELF)
    tasks = long_context(tokens * 11 // 13, documents=60, train_size=3, test_size=1)
    lengths = []
    for task in [*tasks.tasks("train"), *tasks.tasks("test")]:
        lengths.append(len(renderer.render_prompt(task.prompt)))
        thought = "The documents say it. " * 400
        assert asyncio.run(tasks.grade(task, f"{thought}\n{tasks.gold(task)}"))["reward"] == 1
    after = resource.getrusage(resource.RUSAGE_SELF)
    used = {
        "tokens": lengths,
        "megabytes": (after.ru_maxrss - before.ru_maxrss) / 1024,
        "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
    }
    print(json.dumps(used))


if __name__ == "__main__":
    main(int(sys.argv[1]))
