"""Weighted sampling from many numbers that change occasionally, each operation in logarithmic time."""


class SumTree:
    """Non-negative numbers, all 0 at first. Each node is the sum of its two children, so rounding errors don't
    accumulate.

    >>> tree = SumTree(3)
    >>> tree.put(0, 1.0); tree.put(2, 3.0)
    >>> tree.total, tree.pick(0.2), tree.pick(0.3)
    (4.0, 0, 2)
    """

    def __init__(self, count: int) -> None:
        self._leaves = 1 << count.bit_length()  # a power of two, so that the leaves are in order
        self._sums = [0.0] * (2 * self._leaves)  # the root at 1, the children of i at 2 i and 2 i + 1

    @property
    def total(self) -> float:
        return self._sums[1]

    def put(self, index: int, number: float) -> None:
        """Set one of the numbers."""
        at = self._leaves + index
        self._sums[at] = number
        while at := at // 2:
            self._sums[at] = self._sums[2 * at] + self._sums[2 * at + 1]

    def pick(self, share: float) -> int:
        """Return the index at which the sum from the left passes ``share`` of the total, in [0, 1)."""
        at, left = 1, share * self.total
        while at < self._leaves:
            at = 2 * at
            if left >= self._sums[at] and self._sums[at + 1]:
                left -= self._sums[at]
                at += 1
        return at - self._leaves
