"""Check the demo's result: its student has learned, whatever its control without a teacher has."""

import json
import sys
from pathlib import Path

folder = Path(sys.argv[1])
figures = json.loads((folder / "results.json").read_bytes())["figures"]
lines = (folder / "student" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
first = next(e for e in map(json.loads, lines) if e["kind"] == "evaluation" and e["step"] == 0)
student = figures["student"]["accuracy"][0]  # [value, lower, upper]
others = {
    "its layers, untrained": figures["the same layers, untrained"]["accuracy"][0],
    "the most frequent token": first["constant_accuracy"],
}
control = figures["the same layers without a teacher"]["accuracy"][0]
shown = {**others, "trained without a teacher": control}
print(f"the demo's student: {student:.3f};", *(f"{k}: {v:.3f}" for k, v in shown.items()))
if not student >= 0.3:
    sys.exit("the demo's student guesses below 30 % of masked tokens")
for name, accuracy in others.items():
    if not student >= accuracy + 0.2:
        sys.exit(f"the demo's student is not 20 points ahead of {name}")
