"""Binning of rows by size: the rows of a bin are padded to one size and computed together."""

_PADDING = 1.25  # maximum ratio of a bin's query-key pairs, with padding, to the pairs that its rows need ...
_SLACK = 1 << 16  # ... plus this many pairs, which cost about as much as starting another block


def bins_of(before: list[int], lengths: list[int]) -> list[list[int]]:
    """Group rows into bins of similar size, to limit padding. Return the indices of each bin's rows."""
    bins: list[list[int]] = []
    longest, needed, size = 0, 0, (0, 0)
    for i in sorted(range(len(lengths)), key=lambda i: (before[i], lengths[i])):
        pairs = lengths[i] * (before[i] + lengths[i])
        padded = (max(size[0], lengths[i]), max(size[1], before[i] + lengths[i]))
        count = len(bins[-1]) + 1 if bins else 1
        fits = count * padded[0] * padded[1] <= _PADDING * (needed + pairs) + _SLACK
        if not bins or not fits or (before[i] == 0) != (longest == 0):
            bins.append([])
            needed, padded = 0, (lengths[i], before[i] + lengths[i])
        bins[-1].append(i)
        longest, needed, size = before[i], needed + pairs, padded
    return bins
