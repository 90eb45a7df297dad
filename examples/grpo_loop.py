"""GRPO from its parts: sample groups, compare the answers of each, update, publish. The loop is yours.

python examples/grpo_loop.py steps=5
"""

import asyncio
import sys

import whet
from whet.algorithms.grpo import GroupAdvantage
from whet.losses.composite import PolicyLoss


async def main(overrides: list[str]) -> None:
    async with whet.open("quickstart", *overrides) as run:
        recipe = run.recipe
        await run.evaluate(0)
        for step in range(1, recipe.steps + 1):
            tasks = run.tasks.next(recipe.rollouts.prompts_per_step)
            groups = await run.policy.sample(tasks, n=recipe.online.group_size)
            batch = GroupAdvantage()(run.policy.batch(groups))
            update = await run.policy.update(batch.weigh("token"), PolicyLoss())
            await run.policy.publish()  # the engine samples with the new weights from here on
            print(f"step {step}: reward {run.log(step, update)['reward/mean']:.2f}")
        print(f"accuracy {(await run.evaluate(recipe.steps))['evaluation/accuracy']:.1%}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
