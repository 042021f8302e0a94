"""Append the scores of a recipe's runs to a record, beside what each run cost.

    python benchmarks/scores.py SCORES_JSON --record FILE

SCORES_JSON is what stage `scores` wrote; the runs that it names are read from the same working
directory. A row is a model and a seed; of each task it has the score, and the CPU seconds where
the run logged them, with those of a run that its student continues. A model of one seed has the
score's interval. One more row of each model has its difference from the baseline, and its share of
the room.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from pretrain.monitor.figures import Figure
from pretrain.monitor.records import append_record, of_run, row
from pretrain.run_folder import recorded


def main() -> None:
    """Read scores and runs, and append a record for each task and one for all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scores", type=Path)
    parser.add_argument("--record", type=Path, required=True)
    arguments = parser.parse_args()
    kept = json.loads(arguments.scores.read_bytes())
    rows: dict[Path, list[dict[str, Any]]] = defaultdict(list)
    for model, runs in kept["inputs"]["models"].items():
        for run in runs:
            config = recorded(Path(run))
            assert config is not None, (
                f"{run}: no run was recorded there; start in the folder of the recipe"
            )
            task, seed = config.shards.name, config.train.seed
            seeds, known = kept["seeds"][model][task], of_run(Path(run))
            figure = seeds[str(seed)] if len(seeds) > 1 else Figure(**kept["figures"][model][task])
            figures = {task: figure}
            before = config.student.init if config.student else None
            first = of_run(Path(before)) if isinstance(before, str) else {}
            if "cpu_seconds" in known:
                seconds = known["cpu_seconds"] + first.get("cpu_seconds", 0.0)
                figures[f"{task} CPU seconds"] = seconds
            rows[config.shards].append(row(model, figures, seed=seed, objective=known["objective"]))
    for shards, found in rows.items():
        append_record(arguments.record, shards, found)
    both = []
    for model, others in kept["others"].items():
        figures = {k: Figure(*value) for k, value in others.items() if isinstance(value, list)}
        if figures:
            both.append(row(model, figures))
    append_record(arguments.record, None, both)


if __name__ == "__main__":
    main()
