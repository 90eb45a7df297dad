"""The built-in task sets in small sizes, for the tests that all of them must pass."""

from whet.tasks.adapters.reasoning_gym import ReasoningGym
from whet.tasks.base import TaskSet
from whet.tasks.choice.task_set import MultipleChoice
from whet.tasks.games import Guessing, SlidingPuzzle
from whet.tasks.instructions.task_set import InstructionFollowing
from whet.tasks.long_context import LongContext
from whet.tasks.math.arithmetic import Arithmetic
from whet.tasks.pictures import Pictures
from whet.tasks.self_play import Nim
from whet.tasks.structured.task_set import StructuredOutput
from whet.tasks.tools.calculator import Calculator
from whet.tasks.tools.corpus_search import CorpusSearch
from whet.tasks.tools.database import Database
from whet.tasks.users.booking import BookingDesk

BUILT_IN: list[TaskSet] = [
    Arithmetic(train_size=30, test_size=5),
    Arithmetic(train_size=30, test_size=5, stories=1.0),
    BookingDesk(train_size=20, test_size=5),
    Calculator(train_size=20, test_size=5),
    CorpusSearch(train_size=20, test_size=5),
    Database(train_size=20, test_size=5),
    Guessing(train_size=20, test_size=5),
    InstructionFollowing(train_size=20, test_size=5),
    LongContext(train_size=20, test_size=5),
    LongContext(train_size=20, test_size=5, kinds=("chain", "comparison", "count")),
    MultipleChoice(train_size=20, test_size=5),
    MultipleChoice(train_size=20, test_size=5, mode="lenient"),
    MultipleChoice(train_size=20, test_size=5, mode="line"),
    Nim(stones=9, games=1),
    Pictures(train_size=20, test_size=5),
    SlidingPuzzle(train_size=20, test_size=5),
    StructuredOutput(train_size=20, test_size=5),
    ReasoningGym(dataset="chain_sum", train_size=10, test_size=5),
    ReasoningGym(dataset="letter_counting", train_size=10, test_size=5, answer="last_line"),
]
