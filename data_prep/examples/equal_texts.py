"""Find examples with equal texts: doubled, with another label, or in two splits.

Texts are equal if they are so without case, invisible characters, in one form of Unicode and with
one space in place of each run of white space; of a pair both are.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from data_prep import CorpusError
from data_prep.duplicates.minhash import word_hashes
from data_prep.examples.encoding import Example
from data_prep.examples.examples_config import ExamplesConfig, Kind, Split
from data_prep.examples.values import folded
from data_prep.messages import one_line

_FEW = 5  # words; shorter texts, such as "thank you", are in each set of data
_MANY, _MOST = 0.01, 0.1  # shares of a split's texts that are warned of, and refused
DOUBLED, CONTRADICTING, SHARED = (
    "texts that are there twice",
    "twice with another label",
    "texts of an earlier split",
)


def groups_of(examples: Sequence[Example], task: Kind) -> dict[bytes, list[int]]:
    """Return the numbers of the examples of each text, by 16 bytes of hash.

    The two texts of a similarity have no order.
    """
    groups: dict[bytes, list[int]] = {}
    for number, example in enumerate(examples):
        both = [folded(example.text), folded(example.pair or "")]
        text = "\0".join(sorted(both) if task == "similarity" else both)
        key = hashlib.blake2b(text.encode(), digest_size=16).digest()
        groups.setdefault(key, []).append(number)
    return groups


def counts_of(
    found: Mapping[Split, Sequence[Example]],
    spare: Sequence[Example],
    label_of: Callable[[Example], Any],
    config: ExamplesConfig,
    warn: Callable[[str], None],
) -> dict[Split, dict[str, int]]:
    """Return for each split how many of its examples have the text of another one.

    Args:
        found: examples by split; each is compared with itself and with those before it.
        spare: examples without labels, which are trained on, too.
        label_of: returns a key that is the same for equal labels; None without a label.
        config: with `allow_shared`, shared texts give a warning instead of an error.
        warn: receives what a user should know.

    Raises:
        CorpusError: many texts of a split are in an earlier one, such as training.
    """
    counts: dict[Split, dict[str, int]] = {}
    task, earlier = config.task.name, dict[bytes, str]()  # the latter: what has a text
    earlier |= dict.fromkeys(groups_of(spare, task), "unlabelled")
    for split, examples in found.items():
        groups, noted = groups_of(examples, task), Counter[str]()
        shared: dict[str, list[int]] = {}  # but for short texts
        for key, numbers in groups.items():
            first = examples[numbers[0]]
            labels = {repr(label_of(examples[n])) for n in numbers if len(numbers) > 1} - {"None"}
            noted[DOUBLED] += len(numbers) - 1
            noted[CONTRADICTING] += (len(numbers) - 1) * (len(labels) > 1)
            if split != "train" and (other := earlier.get(key)):
                noted[SHARED] += len(numbers)
                if len(word_hashes(f"{first.text} {first.pair or ''}")) >= _FEW:
                    shared.setdefault(other, []).extend(numbers)
        for other, numbers in shared.items():
            num, example = len(numbers), examples[numbers[0]]
            text = (
                f"{num:,} of {len(examples):,} texts of {split} ({num / len(examples):.0%}) are in "
                f"{other}, too, such as {one_line(example.text, 60)!r}"
            )
            if num > _MOST * len(examples) and not config.allow_shared:
                raise CorpusError(
                    f"{text}: scores would be of what was learnt by heart; leave them out, or set "
                    "allow_shared: true"
                )
            if num > _MANY * len(examples):
                warn(text)
        earlier |= dict.fromkeys(groups.keys() - earlier, split)
        counts[split] = {name: num for name, num in noted.items() if num}
    return counts
