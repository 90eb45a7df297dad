"""The example of the documentation runs, fits on a screen, and is what the documentation shows."""

import asyncio
from pathlib import Path

from examples.my_environment import LetterCount

ROOT = Path(__file__).parents[2]


def test_the_example_poses_and_grades():
    taskset = LetterCount()
    train, test = taskset.tasks("train"), taskset.tasks("test")
    assert not {task.uid for task in train} & {task.uid for task in test}
    task = taskset.task("strawberry", "r")
    for reply, reward in (("\\boxed{3}", 1), ("\\boxed{2}", 0), ("3", 0)):
        step = asyncio.run(taskset.make(task).step({"role": "assistant", "content": reply}))
        assert (step.reward, step.done) == (reward, True)


def test_the_example_is_short_and_the_documentation_shows_it_as_it_is():
    source = (ROOT / "examples" / "my_environment.py").read_text(encoding="utf-8")
    body = [line for line in source.partition("\n\n")[2].splitlines() if line.strip()]
    assert len(body) <= 30
    page = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
    assert source.partition('"""\n')[2].strip() in page


def test_the_multi_turn_example_of_the_documentation_plays_to_its_end():
    page = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
    code = next(part for part in page.split("```python\n")[1:] if "class GuessNumber" in part).partition("```")[0]
    names: dict = {"__name__": "documented"}
    exec(compile(code, "docs/environments.md", "exec"), names)
    taskset = names["GuessNumbers"]()

    async def play():
        episode = taskset.make(taskset.tasks("train")[0])
        await episode.start()
        low, high, rewards = 0, 100, []
        for _ in range(10):
            guess = (low + high) // 2
            step = await episode.step({"role": "assistant", "content": f"I say {guess}"})
            rewards.append(step.reward)
            if step.done:
                return rewards
            low, high = (guess + 1, high) if step.messages[0]["content"] == "higher" else (low, guess - 1)
        return rewards

    rewards = asyncio.run(play())
    assert rewards[-1] == 1
    assert sum(rewards) == 1
