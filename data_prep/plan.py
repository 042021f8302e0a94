"""Units of work, cut by sizes alone: the number of workers never changes them."""

from collections.abc import Sequence


def group(sizes: Sequence[int], limit: int) -> list[range]:
    """Join consecutive items into groups of at most `limit`; a larger item stands alone."""
    groups: list[range] = []
    start, total = 0, 0
    for item, size in enumerate(sizes):
        if item > start and total + size > limit:
            groups.append(range(start, item))
            start, total = item, 0
        total += size
    if len(sizes) > start:
        groups.append(range(start, len(sizes)))
    return groups
