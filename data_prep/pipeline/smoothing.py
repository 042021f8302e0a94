"""Compute the table for frequency-weighted masking: count ** -0.7, in integers."""

from __future__ import annotations

from decimal import ROUND_HALF_EVEN, Decimal, localcontext

import numpy as np
import numpy.typing as npt

from data_prep.shards.manifest import SpecialIds

LIMIT = 2**25


def smoothing(counts: npt.NDArray[np.int64], special: SpecialIds) -> list[int]:
    """Return count ** 0.7 as integers from 1 to 2**25 - 1, for sampling by count ** -0.7.

    Special ids are never sampled and have the largest value, so that padding takes no range.
    """
    specials = set(special.model_dump().values())
    with localcontext() as context:  # exact and the same on every machine, as libm's pow is not
        context.prec = 25
        context.rounding = ROUND_HALF_EVEN
        power = {count: Decimal(max(count, 1)) ** Decimal("0.7") for count in set(counts.tolist())}
        powers = [power[count] for count in counts.tolist()]
        largest = max(value for id, value in enumerate(powers) if id not in specials)
        scale = (LIMIT - 1) / largest
        return [
            LIMIT - 1 if id in specials else max(1, int((value * scale).to_integral_value()))
            for id, value in enumerate(powers)
        ]
