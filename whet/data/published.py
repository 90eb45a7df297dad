"""Published data sets by name, as values: rows with their path on the Hugging Face Hub and their columns. A copy on
this machine is read in the same way,

    data: {type: ultrafeedback, path: "ultrafeedback/train_prefs-*.parquet"}
"""

from typing import ClassVar

from pydantic import Field

from whet.core.types import Message
from whet.data.row_kinds import Answer, Asked, Example, Pair, as_messages
from whet.data.rows import PreferenceRows, SupervisedRows

ALPACA = SupervisedRows(path="hf:tatsu-lab/alpaca:train")
DOLLY = SupervisedRows(path="hf:databricks/databricks-dolly-15k:train")
OPEN_MATH_INSTRUCT_2 = SupervisedRows(
    path="hf:nvidia/OpenMathInstruct-2:train_1M", columns={"prompt": "problem", "completion": "generated_solution"}
)
LLAMA_NEMOTRON = SupervisedRows(
    path="hf:nvidia/Llama-Nemotron-Post-Training-Dataset:SFT:chat",
    columns={"prompt": "input", "completion": "output", "system": "system_prompt"},
)  # other splits: code, math, science, safety
NEMOTRON_POST_TRAINING_V1 = SupervisedRows(
    path="hf:nvidia/Nemotron-Post-Training-Dataset-v1:chat"
)  # other splits: code, math, stem, tool_calling
NEMOTRON_POST_TRAINING_V2 = SupervisedRows(
    path="hf:nvidia/Nemotron-Post-Training-Dataset-v2:chat"
)  # other splits: code, math, stem, multilingual_de, ...
NUMINA_MATH_COT = SupervisedRows(path="hf:AI-MO/NuminaMath-CoT:train")
TULU_3_SFT = SupervisedRows(path="hf:allenai/tulu-3-sft-mixture:train")
ULTRACHAT = SupervisedRows(
    path="hf:HuggingFaceH4/ultrachat_200k:train_sft", test_path="hf:HuggingFaceH4/ultrachat_200k:test_sft"
)

HH = PreferenceRows(path="hf:Anthropic/hh-rlhf:train", test_path="hf:Anthropic/hh-rlhf:test")
TULU_3_PREFERENCE = PreferenceRows(path="hf:allenai/llama-3.1-tulu-3-8b-preference-mixture:train")
ULTRAFEEDBACK = PreferenceRows(
    path="hf:HuggingFaceH4/ultrafeedback_binarized:train_prefs",
    test_path="hf:HuggingFaceH4/ultrafeedback_binarized:test_prefs",
)


class HelpSteer3Pair(Pair):
    """Two responses to a conversation, and which is better: -3 to -1 for the first, 1 to 3 for the second, 0 for a
    tie, which is left out."""

    context: Asked
    response1: str
    response2: str
    overall_preference: int = Field(ge=-3, le=3)

    @property
    def question(self) -> list[Message]:
        return as_messages(self.context)

    @property
    def answers(self) -> list[Answer]:
        question, preference = self.question, self.overall_preference
        first, second = (Answer(name, [*question, {"role": "assistant", "content": text}])
                         for name, text in (("response1", self.response1), ("response2", self.response2)))  # fmt: skip
        if preference == 0:
            return [first, second]
        better, worse = (first, second) if preference < 0 else (second, first)
        return [Answer(better.field, better.messages, 1.0), worse]


class HelpSteer3Rows(PreferenceRows):
    """Rows of nvidia/HelpSteer3, configuration ``preference``."""

    kind: ClassVar[type[Example]] = HelpSteer3Pair
    path: str = "hf:nvidia/HelpSteer3:preference:train"
    test_path: str | None = "hf:nvidia/HelpSteer3:preference:validation"
