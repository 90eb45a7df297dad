"""An environment as verifiers packages it: sums in one turn, or with a tool, or with hints over several turns."""

import verifiers as vf
from datasets import Dataset


def load_environment(kind: str = "single", fault: str = "", evaluation: bool = False) -> vf.Environment:
    rows = Dataset.from_list([{"question": f"{n} + 1?", "answer": str(n + 1)} for n in range(20)])

    def correct(completion, answer, **_):
        if fault == "network":
            raise ConnectionError("no judge")
        return float(int(completion[-1].content) == int(answer))

    async def brevity(completion):
        return float(len(completion[-1].content) < 5)

    rubric = vf.Rubric(funcs=[correct, brevity], weights=[1.0, 0.5])
    given = {"dataset": rows, "rubric": rubric, "system_prompt": "Be brief."}
    if evaluation:
        given["eval_dataset"] = Dataset.from_list([{"question": "7 + 7?", "answer": "14"}])
    if fault == "group":
        given["rubric"] = vf.Rubric(funcs=[lambda completions: [0.0 for _ in completions]])

    def add(a: int, b: int) -> int:
        """Add.

        Args:
            a: one
            b: other
        """
        return a + b

    class Hints(vf.MultiTurnEnv):
        async def env_response(self, messages, state, **_):
            if fault == "world":
                raise OSError("the world is gone")
            return [vf.UserMessage(content="Think again.")]

    if kind == "tool":
        return vf.ToolEnv(tools=[add], max_turns=4, **given)
    return Hints(max_turns=2, **given) if kind == "hints" else vf.SingleTurnEnv(**given)
