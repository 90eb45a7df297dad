"""Nim, a game of two players: in training the policy, or two of them, play both seats, or one policy plays one seat
against a player by rules or another model; in evaluations one seat against players by rules.

A heap holds some stones, and the players take from 1 to ``most`` stones in turn. The player who takes the last stone
wins: reward 1, and 0 for the other. A reply that is not a legal move, written as a number alone, loses the game, with
the reward ``illegal``.
"""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from whet.base.extras import require
from whet.base.seeds import derive_seed
from whet.core.content import text_of
from whet.core.types import Message, Task
from whet.tasks.base import Environment, Observation, Step, TaskSet
from whet.tasks.cases import Answer, Case, Kind, question_of
from whet.tasks.judges.config import OtherModel
from whet.tasks.scores import CORRECT, NamedScore
from whet.tasks.splits import checked_split

if TYPE_CHECKING:
    from whet.tasks.nim_opponent import ModelPlayer, NimEnvironments

Opponent = Literal["self", "random", "perfect", "model"]
_SEATS = ("first", "second")
_OPPONENTS = ("random", "perfect", "model")


@dataclass(frozen=True, slots=True)
class Heap:
    """The beginning of a game."""

    stones: int
    most: int  # stones that a move takes
    opponent: Opponent
    seat: str  # of the policy, first or second
    seed: int  # of the opponent's moves
    illegal: float = 0.0  # reward of a player whose reply is not a legal move


class Nim(TaskSet[Heap]):
    """Games of Nim. Every test game is against a fixed opponent, from a position that the policy's seat can win."""

    named_scores = CORRECT | {name: NamedScore() for name in ("legal", *(f"won_against_{name}" for name in _OPPONENTS))}

    stones: int = Field(default=7, ge=2, le=1000)
    """Stones of the largest heap."""
    most: int = Field(default=3, ge=2)
    """Most stones that a move takes."""
    opponent: Opponent = "self"
    """The opponent in training. ``self``: the run's policy, or policies, play both seats; ``model``: another model, not
    trained."""
    server: OtherModel | None = None
    """The other model, with the settings of a judge: one that the run hosts, or the URL of its server."""
    illegal: float = Field(default=0.0, ge=-10, le=0)
    """Reward of a player whose reply is not a legal move. Below 0, a seat that always loses still learns to play."""
    games: int = Field(default=16, ge=1)
    """Games against each fixed opponent from each position."""
    seed: int = 0

    @model_validator(mode="after")
    def _large_enough(self) -> Self:
        if self.stones <= self.most + 1:
            raise ValueError(f"stones must be above most + 1 = {self.most + 1}, or games end at once")
        return self

    @model_validator(mode="after")
    def _has_its_model(self) -> Self:
        if (self.opponent == "model") != (self.server is not None):
            raise ValueError("opponent = model and server belong together: name both, or neither")
        if self.server is not None:
            require("tasks", "data.opponent=model", "httpx")
        if self.server is not None and self.server.verdict == "logprobs":
            raise ValueError("server.verdict = logprobs is for judges; a player writes its moves: leave it out")
        return self

    @property
    def role_names(self) -> Sequence[str]:
        return _SEATS if self.opponent == "self" else ()

    def open(self) -> "Nim | NimEnvironments":
        if self.server is None:
            return self
        from whet.tasks.nim_opponent import NimEnvironments

        return NimEnvironments(self.server)

    def tasks(self, split: str) -> Sequence[Task[Heap]]:
        if checked_split(split) == "test":
            return [*self._against("random", split), *self._against("perfect", split)]
        if self.opponent != "self":
            return self._against(self.opponent, split)
        return [self._task(f"nim/train/{heap}", heap, "self", "first", 0) for heap in range(1, self.stones + 1)]

    def make(self, task: Task[Heap]) -> "NimGame":
        return NimGame(task)

    def gold(self, task: Task[Heap]) -> Answer | None:
        """Return the moves that win against the perfect opponent, which are the only ones; None for other opponents,
        whose mistakes allow other moves."""
        heap = task.data
        if heap.opponent != "perfect":
            return None
        left, most, ours, moves = heap.stones, heap.most, heap.seat == "first", list[Message]()
        while left:
            taken = perfect_move(left, most)
            if ours:
                moves.append({"role": "assistant", "content": str(taken)})
            left, ours = left - taken, not ours
        return moves

    def cases(self) -> Sequence[Case]:
        def case(name: str, heap: int, replies: Sequence[str], expected: float, kind: Kind) -> Case:
            answer: list[Message] = [{"role": "assistant", "content": reply} for reply in replies]
            return Case(name, self._task(f"nim/case/{name}", heap, "perfect", "first", 0), answer, expected, kind)

        m, illegal = self.most, self.illegal
        task = self._task("nim/case/question", m, "perfect", "first", 0)
        return [
            case("takes the last stones", m, [str(m)], 1.0, "good"),
            case("a full stop", m, [f" {m}.\n"], 1.0, "good"),
            case("leaves a lost position", m + 2, ["1", str(m)], 1.0, "good"),
            case("leaves the last stone", m, ["1"], 0.0, "bad"),
            case("more than may be taken", m + 1, [str(m + 1)], illegal, "boundary"),
            case("more than there are", 1, ["2"], illegal, "boundary"),
            case("no stone", m, ["0"], illegal, "boundary"),
            case("says nothing", m, [""], illegal, "adversarial"),
            case("two moves", m, [f"1 or {m}"], illegal, "adversarial"),
            case("a list of all moves", m, ["\n".join(map(str, range(1, m + 1)))], illegal, "adversarial"),
            case("a term", m, [f"{m}-0"], illegal, "adversarial"),
            case("claims to have won", m, [f"{m}. I win. Score: 1"], illegal, "adversarial"),
            case("a constant", m, ["42"], illegal, "adversarial"),
            Case("the question again", task, question_of(task), illegal, "adversarial"),
        ]

    def _against(self, opponent: Opponent, split: str) -> list[Task[Heap]]:
        return [
            self._task(f"nim/{split}/{opponent}/{heap}/{game}", heap, opponent, self._winning_seat(heap), game)
            for heap in range(self.most + 1, self.stones + 1)
            for game in range(self.games)
        ]

    def _winning_seat(self, heap: int) -> str:
        return _SEATS[heap % (self.most + 1) == 0]

    def _task(self, uid: str, heap: int, opponent: Opponent, seat: str, game: int) -> Task[Heap]:
        seed = derive_seed(self.seed, uid, game)
        prompt: list[Message] = [{"role": "user", "content": rules(heap, self.most)}]
        return Task(uid, prompt, Heap(heap, self.most, opponent, seat, seed, self.illegal))


class NimGame(Environment):
    """One game. The roles ``first`` and ``second`` are the policy's in self-play; otherwise it has one seat."""

    def __init__(self, task: Task[Heap], model: "ModelPlayer | None" = None) -> None:
        heap, self.model = task.data, model
        self.left, self.most, self.opponent, self.illegal = heap.stones, heap.most, heap.opponent, heap.illegal
        self.seat = heap.seat  # the seat that moves next
        self.both, self.moved = self.opponent == "self", set[str]()
        self.dice = random.Random(heap.seed)

    async def start(self) -> Observation:
        prompt = rules(self.left, self.most)
        if not self.both and self.seat == "second":
            prompt = f"{rules(self.left, self.most)}\n{await self._opponent_moves('')}"
        return Observation([{"role": "user", "content": prompt}], role=self.seat if self.both else "")

    async def step(self, reply: Message) -> Step:
        taken = legal_move(text_of(reply["content"]), min(self.left, self.most))
        if taken is None or taken == self.left:
            return self._end(won=taken is not None, legal=taken is not None)
        self.left -= taken
        if self.both:
            return self._next_seat(taken)
        news = await self._opponent_moves(_after(taken, self.left))
        return Step(done=False, messages=[{"role": "user", "content": news}]) if self.left else self._end(False, True)

    def _next_seat(self, taken: int) -> Step:
        """Return the step after which the other seat moves: at its first move it gets the rules, too."""
        self.moved.add(self.seat)
        self.seat = _SEATS[self.seat == "first"]
        news = _after(taken, self.left)
        if self.seat not in self.moved:
            news = f"{rules(self.left + taken, self.most)}\n{news}"
        return Step(done=False, messages=[{"role": "user", "content": news}], role=self.seat)

    def _end(self, won: bool, legal: bool) -> Step:
        """Return the last step: the seat that moved has won or lost."""
        scores, reward = {"legal": float(legal)}, float(won) if legal else self.illegal
        if self.both:
            return Step(scores=scores, rewards=dict.fromkeys(_SEATS, float(not won)) | {self.seat: reward})
        result = float(won)
        return Step(reward, scores=scores | {"correct": result, f"won_against_{self.opponent}": result})

    async def _opponent_moves(self, news: str) -> str:
        """Make the opponent's move, which follows the ``news`` of the policy's. Return what the policy sees of it."""
        if self.model is not None:
            taken = await self.model.move(self.left, self.most, news)
        else:
            taken = OPPONENTS[self.opponent](self.left, self.most, self.dice)
        self.left -= taken
        return _after(taken, self.left)


def rules(heap: int, most: int) -> str:
    """Return the question of a game that begins with ``heap`` stones."""
    return (
        f"Two players take stones in turn, from 1 to {most} each time. The player who takes the last stone wins. "
        f"Reply with a number alone; anything else loses.\nStones: {heap}"
    )


def legal_move(text: str, most: int) -> int | None:
    """Return the number of stones that a reply takes; None if it is not a number from 1 to ``most`` alone."""
    match = re.fullmatch(r"\s*([1-9][0-9]{0,3})\.?\s*", text, re.ASCII)
    return int(match[1]) if match and int(match[1]) <= most else None


def perfect_move(left: int, most: int) -> int:
    """Return a move that wins, if one does, by leaving a multiple of ``most + 1``; otherwise 1."""
    return left % (most + 1) or 1


OPPONENTS: dict[str, Callable[[int, int, random.Random], int]] = {
    "random": lambda left, most, dice: dice.randint(1, min(left, most)),
    "perfect": lambda left, most, _: perfect_move(left, most),
}


def _after(taken: int, left: int) -> str:
    return f"The other player takes {taken}.\nStones: {left}"
