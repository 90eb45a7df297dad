"""Groups for tests: by hand, or drawn by hypothesis."""

from hypothesis import strategies as st

from whet.core.types import Episode, Group, Message, Span, Status, Task, Trajectory


def episode(
    spans: list[Span],
    reward: float = 0.0,
    scores: dict[str, float] | None = None,
    status: Status = Status.COMPLETED,
    messages: list[Message] | None = None,
    error: str | None = None,
) -> Episode:
    """An episode of one branch."""
    return Episode([Trajectory(spans, messages or [])], reward, scores or {}, status, error=error)


def group(uid: str, prompt: list[int], answers: list[list[int]], rewards: list[float] | None = None) -> Group:
    """One group: a prompt and trained answers; every sampled token has log-prob -1."""
    rewards = rewards or [float(i) for i in range(len(answers))]
    episodes = [
        episode([Span(prompt, False), Span(answer, True, [-1.0] * len(answer), (0, 0))], reward=reward)
        for answer, reward in zip(answers, rewards, strict=True)
    ]
    return Group(uid, Task(uid.split(":")[-1], []), episodes)


@st.composite
def groups(draw: st.DrawFn, vocabulary: int = 32, longest: int = 12) -> list[Group]:
    """One to four groups of one to four multi-turn episodes of one or two branches, some of which begin alike, or of
    none; answers may be empty or untrained."""
    tokens = st.lists(st.integers(0, vocabulary - 1), max_size=longest)
    system = draw(st.sampled_from([[], [7] * 20]))
    made = []
    for index in range(draw(st.integers(1, 4))):
        prompt = system + draw(st.lists(st.integers(0, vocabulary - 1), min_size=1, max_size=longest))
        episodes = []
        for _ in range(draw(st.integers(1, 4))):
            branches = []
            for _ in range(draw(st.sampled_from([1, 1, 1, 2, 0]))):
                spans = [Span(prompt, False), Span(draw(st.sampled_from([[], [3] * 20, [3] * 25])), False)]
                for _ in range(draw(st.integers(1, 2))):
                    spans.append(Span(draw(tokens), draw(st.sampled_from([True, True, True, False]))))
                    spans.append(Span(draw(tokens), False))
                branches.append(Trajectory(spans))
            status = Status.COMPLETED if branches else Status.TRUNCATED
            episodes.append(Episode(branches, reward=draw(st.floats(-2, 2)), status=status))
        made.append(Group(f"g{index}", Task(f"t{index}", []), episodes))
    return made
