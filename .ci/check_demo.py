"""Check the demo: its student has learned, and more than its layers did without a teacher."""

import json
import sys
from pathlib import Path

folder = Path(sys.argv[1])
figures = json.loads((folder / "results.json").read_bytes())["figures"]
lines = (folder / "student" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
first = next(e for e in map(json.loads, lines) if e["kind"] == "evaluation" and e["step"] == 0)
student = figures["student"]["accuracy"][0]  # [value, lower, upper]
others = {  # and by how much the student is ahead at least
    "its layers, untrained": (figures["the same layers, untrained"]["accuracy"][0], 0.2),
    "the most frequent token": (first["constant_accuracy"], 0.2),
    "its layers, trained without a teacher": (
        figures["the same layers without a teacher"]["accuracy"][0],
        0.0,
    ),
}
print(f"the demo's student: {student:.3f};", *(f"{k}: {v:.3f}" for k, (v, _) in others.items()))
if not student >= 0.3:
    sys.exit("the demo's student guesses below 30 % of masked tokens")
for name, (accuracy, least) in others.items():
    if not student >= accuracy + least:
        sys.exit(f"the demo's student is not {100 * least:.0f} points ahead of {name}")
