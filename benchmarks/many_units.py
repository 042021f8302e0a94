"""Plan a corpus of very many units and say what the driver takes: seconds and memory.

    python -m benchmarks.many_units 100000

Each input is a file of one document and, as `piece_bytes` is 1, a unit. One unit of extraction is
made for real; its record, with other numbers, stands for all others.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from pathlib import Path

from data_prep.config import CorpusConfig
from data_prep.pipeline.plan import STAGES, Plan
from data_prep.pipeline.units import UnitRecord, run_unit, sealed


def main(num: int) -> None:
    """Plan `num` units of extraction."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(num):
            place = folder / "texts" / f"{number // 1000:06d}"
            place.mkdir(parents=True, exist_ok=True)
            (place / f"{number:09d}.txt").write_text(f"text {number} of a few plain words")
        config = CorpusConfig.model_validate(
            {
                "output": folder / "out",
                "sources": [{"kind": "text", "path": str(folder / "texts")}],
                "tokenizer": {"train": {"vocab_size": 100}},
                "validation": 0,
            }
        )
        begun = time.perf_counter()
        plan = Plan(config, piece_bytes=1, part_bytes=1)
        plan.work.mkdir(parents=True)
        _say(f"{num:,} files found", begun)
        plan.finished("examples", [])
        units = plan.units("extract")
        _say(f"{len(units):,} units of extraction planned", begun)
        first = run_unit(STAGES["extract"].run, units[0])
        text = first.model_dump_json().encode()
        print(f"  {len(text):,} bytes of a record")
        records = [
            sealed(UnitRecord.model_validate_json(text), unit=unit.number, identity=unit.identity)
            for unit in units
        ]
        plan.finished("extract", records)
        _say(f"{len(records):,} records of extraction held", begun)
        units = plan.units("match")
        _say(f"{len(units):,} units of match planned", begun)


def _say(text: str, begun: float) -> None:
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{time.perf_counter() - begun:.1f} s, {memory:,.0f} MiB at most: {text}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
