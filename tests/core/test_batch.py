"""The forest of segments: layout, weights, selection."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.groups import episode, group, groups
from whet.base.errors import DataError
from whet.core.batch import Batch, ModelOutput
from whet.core.expert_ids import decode, encode
from whet.core.forest import MIN_COMMON_PREFIX, counted, sequences_below
from whet.core.packing import pack
from whet.core.types import Distribution, Episode, Group, Span, Status, Task, Trajectory


def paths(batch: Batch) -> list[tuple[list[int], list[bool]]]:
    """Per sequence, the tokens and trained flags on the path from the root to its last token."""
    length, found = batch.segment_length.tolist(), {}
    for segment, start in enumerate(batch.segment_start.tolist()):
        sequence, indices, at = int(batch.sequence[start]), [], segment
        while at >= 0:
            begin = int(batch.segment_start[at])
            indices = [*range(begin, begin + length[at]), *indices]
            at = int(batch.segment_parent[at])
        if sequence >= 0:
            assert batch.position[indices].tolist() == list(range(len(indices)))
            assert batch.predictor[indices].tolist() == [-1, *indices[:-1]]
            found[sequence] = (batch.tokens[indices].tolist(), batch.trained[indices].tolist())
    return [found.get(sequence, ([], [])) for sequence in range(batch.sequences)]


@settings(max_examples=80, deadline=None)
@given(groups(), st.booleans())
def test_every_trajectory_can_be_read_off_the_forest(made, share):
    batch = Batch.from_groups(made, share_prompts=share)
    trajectories = [t for g in made for t in g.trajectories]
    for trajectory, (tokens, trained) in zip(trajectories, paths(batch), strict=True):
        if not tokens:  # all its tokens are shared and untrained
            assert trajectory.trained_tokens == 0
            continue
        assert tokens == trajectory.tokens
        assert trained == [span.trained for span in trajectory.spans for _ in span.tokens]
    assert bool((batch.sequence[batch.trained] >= 0).all()), "trained tokens belong to exactly one sequence"


@settings(max_examples=80, deadline=None)
@given(groups(), st.booleans(), st.data())
def test_each_token_has_the_experts_of_its_span_and_a_shared_token_has_the_first_sequences(made, share, data):
    count = 0
    for span in [span for one in made for trajectory in one.trajectories for span in trajectory.spans]:
        if span.tokens and data.draw(st.booleans()):
            ids = np.arange(count, count + 6 * len(span.tokens)).reshape(-1, 3, 2).astype(np.int16)
            span.experts, count = encode(ids), count + ids.size
    batch = Batch.from_groups(made, share_prompts=share)
    if not any(span.experts for one in made for trajectory in one.trajectories for span in trajectory.spans):
        assert batch.experts is None
    experts = torch.full((len(batch), 3, 2), -1) if batch.experts is None else batch.experts  # not laid out
    owners = [(own, trajectory) for own in made for trajectory in own.trajectories]
    seen = 0
    for (own, trajectory), path in zip(owners, batch.paths(), strict=True):
        for place, token in enumerate(path.tolist()):
            sharers = [trajectory]
            if batch.sequence[token] < 0:
                root = len(made) > 1 and token < shared_by_all(batch)
                alike = [other for its, other in owners if its is own or root]
                sharers = [other for other in alike if leading(other)[: place + 1] == trajectory.tokens[: place + 1]]
            assert experts[token].tolist() == experts_by_hand(sharers[0])[place]
            seen += 1
    assert seen or not batch.trained.any()
    part, tokens = batch.select(torch.arange(0, batch.sequences, 2))
    assert batch.experts is None or torch.equal(part.experts, experts[tokens])


def shared_by_all(batch: Batch) -> int:
    """The length of a first segment that groups share."""
    roots = (batch.segment_parent < 0).sum()
    return int(batch.segment_length[0]) if roots == 1 else 0


def leading(trajectory: Trajectory) -> list[int]:
    spans = itertools.takewhile(lambda span: not span.trained, trajectory.spans)
    return [token for span in spans for token in span.tokens]


def experts_by_hand(trajectory: Trajectory) -> list[list[list[int]]]:
    found: list[list[list[int]]] = []
    for span in trajectory.spans:
        found += [[[-1, -1]] * 3] * len(span.tokens) if span.experts is None else decode(span.experts).tolist()
    return found


def test_a_prompt_is_laid_out_once_for_all_its_answers():
    batch = Batch.from_groups([group("a", [1, 2, 3], [[4, 5], [6], [7, 8]])])
    assert batch.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert batch.position.tolist() == [0, 1, 2, 3, 4, 3, 3, 4]
    assert batch.predictor.tolist() == [-1, 0, 1, 2, 3, 2, 2, 6]
    assert batch.sequence.tolist() == [-1, -1, -1, 0, 0, 1, 2, 2]
    assert batch.segment_parent.tolist() == [-1, 0, 0, 0]


@settings(max_examples=80, deadline=None)
@given(groups(), st.booleans())
def test_the_sequences_of_a_segment_are_the_paths_through_it(made, share):
    batch = Batch.from_groups(made, share_prompts=share)
    visits = torch.cat([torch.zeros(0, dtype=torch.long), *batch.paths()]).bincount(minlength=len(batch))
    below = sequences_below(batch.segment_parent, batch.segment_sequence)
    assert below.tolist() == visits[batch.segment_start].tolist()


def test_the_common_prefix_of_all_prompts_is_laid_out_once():
    system = list(range(100, 100 + MIN_COMMON_PREFIX))
    batch = Batch.from_groups([group("a", [*system, 1], [[4], [5]]), group("b", [*system, 2], [[6], [7]])])
    assert batch.segment_parent.tolist() == [-1, 0, 1, 1, 0, 4, 4]
    assert len(batch) == MIN_COMMON_PREFIX + 2 + 4


def test_token_mean_gives_every_trained_token_of_the_step_the_same_share():
    weight = Batch.from_groups([group("a", [1], [[2, 3, 4], [5]])]).weigh("token").weight
    assert weight.tolist() == [0, 0.25, 0.25, 0.25, 0.25]


def test_sequence_mean_gives_every_sequence_the_same_share_and_does_not_count_empty_ones():
    weight = Batch.from_groups([group("a", [1], [[2, 3, 4, 5], [6], []])]).weigh("sequence").weight
    assert weight.tolist() == [0, 0.125, 0.125, 0.125, 0.125, 0.5]


def test_group_mean_gives_every_group_the_same_share():
    weight = Batch.from_groups([group("a", [1], [[2, 3], [6]]), group("b", [1], [[9]])]).weigh("group").weight
    assert weight.sum() == pytest.approx(1)
    assert weight.tolist() == pytest.approx([0, 1 / 6, 1 / 6, 1 / 6, 0, 0.5])


@pytest.mark.parametrize(
    ("weighting", "expected"),
    [
        ("token", [1 / 8] * 8),
        ("sequence", [1 / 9] * 6 + [1 / 6] * 2),
        ("group", [1 / 12] * 6 + [1 / 4] * 2),
        ("constant", [1 / 30] * 8),
    ],
)
def test_weights_count_branches_together_and_nothing_that_is_silent(weighting, expected):
    def branch(*answer):
        return Trajectory([Span([1], False), Span(list(answer), True)])

    episodes = [Episode([branch(2, 3), branch(4)]), Episode([branch(5, 6, 7)]), Episode([branch()])]
    made = [episodes, [Episode([branch()])], [Episode([branch(8, 9)])]]
    batch = Batch.from_groups([Group(uid, Task(uid, []), each) for uid, each in zip("abc", made, strict=True)])
    weight = batch.weigh(weighting, 10).weight
    assert weight.dtype == torch.float64
    assert weight[batch.trained].tolist() == pytest.approx(expected, rel=1e-15)
    assert Batch.from_groups([group("a", [1], [[2]])]).weigh(weighting, 1).weight.tolist() == [0, 1]
    silent = Batch.from_groups([Group("b", Task("b", []), made[1])]).weigh(weighting, 10)
    assert silent.share.isfinite().all()


def test_a_constant_divisor_does_not_depend_on_lengths():
    weight = Batch.from_groups([group("a", [1], [[2, 3], [6]])]).weigh("constant", 10).weight
    assert weight.tolist() == pytest.approx([0, 0.05, 0.05, 0.05])
    with pytest.raises(ValueError, match="divisor"):
        Batch.from_groups([group("a", [1], [[2]])]).weigh("constant")


@settings(max_examples=60, deadline=None)
@given(groups(), st.data())
def test_selecting_sequences_keeps_their_paths_and_columns(made, data):
    batch = Batch.from_groups(made).weigh("token")
    chosen = sorted(data.draw(st.sets(st.integers(0, batch.sequences - 1), min_size=1)))
    part, tokens = batch.select(torch.tensor(chosen))
    assert torch.equal(part.tokens, batch.tokens[tokens])
    assert torch.equal(part.weight, batch.weight[tokens])
    assert part.reward.tolist() == batch.reward[chosen].tolist()
    whole = paths(batch)
    assert paths(part) == [whole[index] for index in chosen]


@settings(max_examples=40, deadline=None)
@given(groups(), st.integers(1, 5), st.integers(0, 3))
def test_minibatches_are_made_of_whole_groups(made, count, seed):
    batch = Batch.from_groups(made)
    parts = batch.minibatches(count, seed)
    assert len(parts) == min(count, len(made))
    met = [int(index) for part in parts for index in batch.group[part].unique()]
    assert sorted(met) == list(range(len(made)))
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(batch.sequences))
    assert all(torch.equal(part, part.sort().values) for part in parts)


@settings(max_examples=40, deadline=None)
@given(groups(), st.data())
def test_user_defined_columns_are_selected_along_their_axis(made, data):
    batch = Batch.from_groups(made)
    batch.fill("of_token", torch.arange(2 * len(batch)).reshape(-1, 2))
    batch.fill("of_sequence", torch.arange(batch.sequences), axis="sequence")
    chosen = sorted(data.draw(st.sets(st.integers(0, batch.sequences - 1), min_size=1)))
    part, tokens = batch.weigh("token").select(torch.tensor(chosen))
    assert part.column("of_token")[:, 0].tolist() == [2 * t for t in tokens.tolist()]
    assert part.column("of_sequence").tolist() == chosen
    assert part.to("cpu").filled == part.filled == batch.filled | {"share", "weight"}
    for micro in (m for rank in pack(batch, 2, 400) for m in rank):
        assert torch.equal(micro.batch.column("of_token"), batch.column("of_token")[micro.tokens])
        assert micro.batch.column("of_sequence").numel() == micro.batch.sequences


def test_a_new_batch_has_what_was_sampled_and_no_further_column():
    made = [group("a", [1, 2], [[3, 4], [5]])]
    batch = Batch.from_groups(made)
    assert batch.filled == {"rollout_logprobs"}
    assert batch.advantages is None
    assert batch.weight is None
    assert batch.distribution == Distribution()
    assert Batch.from_groups(made, distribution=Distribution(0.5)).distribution == Distribution(0.5)


def test_an_output_has_the_columns_that_the_model_was_asked_for():
    logprobs, values = torch.zeros(3), torch.ones(3)
    output = ModelOutput(logprobs, values=values)
    assert output.columns() == {"logprobs": logprobs, "values": values}
    assert output.column("values") is values
    with pytest.raises(DataError, match="not asked for 'entropy'"):
        output.column("entropy")


def test_common_and_user_defined_columns_are_filled_and_read_alike():
    batch = Batch.from_groups([group("a", [1, 2], [[3, 4], [5]])])
    batch.fill("advantages", torch.ones(5))
    assert batch.advantages is batch.column("advantages")
    again = batch.weigh("token")
    again.fill("mine", torch.zeros(2), axis="sequence")
    assert "mine" not in batch.filled
    assert again.filled == {"advantages", "mine", "rollout_logprobs", "share", "weight"}
    with pytest.raises(DataError, match=r"'mine' is not filled\. Filled columns: advantages"):
        batch.column("mine")
    with pytest.raises(DataError, match=r"'mine' has the shape \[5\], but there are 2 sequences"):
        batch.fill("mine", torch.zeros(5), axis="sequence")
    with pytest.raises(DataError, match=r"'returns' has the shape \[2\], but there are 5 tokens"):
        batch.fill("returns", torch.zeros(2))
    with pytest.raises(DataError, match=r'computed from the column "share"'):
        batch.fill("weight", torch.zeros(5))


def test_per_sequence_sums_trained_tokens_and_per_token_spreads_back():
    batch = Batch.from_groups([group("a", [1, 2], [[3, 4], [5]])])
    assert batch.per_sequence(torch.arange(5.0)).tolist() == [5, 4]
    assert batch.per_token(torch.tensor([1.0, 2.0])).tolist() == [0, 0, 1, 1, 2]


def test_the_first_token_of_a_root_has_no_predictor_and_is_not_trained():
    lone = Group("a", Task("t", []), [episode([Span([1, 2, 3], True)])])
    assert Batch.from_groups([lone]).trained.tolist() == [False, True, True]


def test_failed_and_empty_trajectories_are_refused_by_name():
    failed = Group("bad", Task("t", []), [episode([], status=Status.FAILED, error="no route")])
    with pytest.raises(DataError, match=r"'bad'.*no route"):
        Batch.from_groups([failed])
    with pytest.raises(DataError, match=r"'empty'.*without tokens"):
        Batch.from_groups([Group("empty", Task("t", []), [episode([])])])
    short = Group("short", Task("t", []), [episode([Span([1], False), Span([2, 3], True, [-1.0])])])
    with pytest.raises(DataError, match=r"'short'.*2 sampled tokens with 1"):
        Batch.from_groups([short])


def test_branches_share_their_common_prefix_beyond_the_prompt():
    def branch(*parts: list[int]) -> Trajectory:
        return Trajectory([*(Span(part, False) for part in parts), Span([9], True)])

    prompt, history = [1, 2], [5] * MIN_COMMON_PREFIX
    one = Episode([branch(prompt, history, [6]), branch(prompt, [8]), branch(prompt, history, [7])])
    batch = Batch.from_groups([Group("g", Task("t", []), [one])])
    assert len(batch) == len(prompt) + len(history) + 3 * 2, "the history is laid out once"
    assert batch.segment_parent.tolist() == [-1, 0, 1, 1, 0]
    assert [batch.tokens[path].tolist() for path in batch.paths()] == [b.tokens for b in one.branches]
    assert batch.episode.tolist() == [0, 0, 0]


def test_trained_tokens_are_ordered_by_sequence():
    common = [5] * MIN_COMMON_PREFIX
    rows = [[1, *common, 2], [1, 3], [1, *common, 4]]
    made = [Episode([Trajectory([Span(row, False), Span([10 + i], True)])]) for i, row in enumerate(rows)]
    batch = Batch.from_groups([Group("g", Task("t", []), made)])
    assert batch.tokens[batch.trained].tolist() != [10, 11, 12], "the first and the last share a beginning"
    assert batch.tokens[batch.trained_tokens].tolist() == [10, 11, 12]
    assert [batch.tokens[path].tolist() for path in batch.paths()] == [[*row, 10 + i] for i, row in enumerate(rows)]


@settings(max_examples=40, deadline=None)
@given(groups(), st.integers(1, 60))
def test_the_parts_of_a_batch_have_each_sequence_once_and_in_order(made, tokens):
    batch = Batch.from_groups(made)
    batch.fill("number", torch.arange(batch.sequences), axis="sequence")
    parts = list(batch.parts(tokens))
    assert torch.cat([part.column("number") for part in parts]).tolist() == list(range(batch.sequences))
    assert sum(int(part.trained.sum()) for part in parts) == int(batch.trained.sum())
    own = [part.segment_length[part.segment_sequence >= 0] for part in parts]
    assert all(int(each.sum()) <= tokens + int(each.max()) for each in own if each.numel() > 1)


@settings(max_examples=40, deadline=None)
@given(groups(), st.data())
def test_advantages_of_sequences_are_read_as_advantages_of_tokens(made, data):
    batch = Batch.from_groups(made)
    values = torch.randn(batch.sequences, dtype=torch.float64)
    batch.fill("advantages", values, axis="sequence")
    expected = batch.per_token(values)
    assert torch.equal(batch.advantages, expected)
    assert torch.equal(batch.column("advantages"), expected)
    assert batch.tensors()["answer_advantages"] is values
    assert "advantages" in batch.filled
    chosen = sorted(data.draw(st.sets(st.integers(0, batch.sequences - 1), min_size=1)))
    part, tokens = batch.select(torch.tensor(chosen))
    assert torch.equal(part.advantages, expected[tokens].masked_fill(~part.trained, 0))
    batch.advantages = expected + 1
    assert torch.equal(batch.column("advantages"), expected + 1)
    assert batch.answer_advantages is None


@given(st.lists(st.lists(st.booleans(), max_size=5), min_size=1, max_size=6))
def test_the_tokens_of_a_mask_are_counted_by_run(runs):
    length = torch.tensor([len(run) for run in runs])
    mask = torch.tensor([each for run in runs for each in run], dtype=torch.bool)
    assert counted(mask, length.cumsum(0) - length, length).tolist() == [sum(run) for run in runs]


def test_a_part_of_the_layout_is_no_column():
    batch = Batch.from_groups([group("a", [1, 2], [[3], [4]])])
    for name in ("tokens", "trained", "reward", "scores", "group_uids"):
        with pytest.raises(DataError, match=f"'{name}' is a part of the batch's layout"):
            batch.fill(name, torch.zeros(len(batch)))
    with pytest.raises(DataError, match=r"set batch\.reward = values"):
        batch.fill("reward", torch.zeros(batch.sequences), axis="sequence")


def test_an_unknown_weighting_is_an_error():
    batch = Batch.from_groups([group("a", [1, 2], [[3], [4]])])
    with pytest.raises(ValueError, match="'token', 'sequence', 'group' or 'constant', not 'tokens'"):
        batch.weigh("tokens", divisor=8)
