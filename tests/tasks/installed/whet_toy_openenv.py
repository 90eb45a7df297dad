"""A server of OpenEnv with a hidden number: `python whet_toy_openenv.py PORT`."""

import random
import sys

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    number: int


class Hint(Observation):
    hint: str = ""


class Hidden(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **_):
        self.number = random.Random(seed).randint(1, 100)
        return Hint(hint="guess a number from 1 to 100")

    def step(self, action):
        far = 1 / action.number and action.number - self.number
        return Hint(hint="higher" if far < 0 else "lower" if far else "right", done=not far, reward=float(not far))

    @property
    def state(self):
        return State()


if __name__ == "__main__":
    app = create_app(Hidden, Guess, Hint, env_name="hidden", max_concurrent_envs=8)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
