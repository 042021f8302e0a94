"""Check the demo's result: its student has learned, and more than its layers had before."""

import json
import sys
from pathlib import Path

folder = Path(sys.argv[1])
figures = json.loads((folder / "results.json").read_bytes())["figures"]
lines = (folder / "alone" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
first = next(e for e in map(json.loads, lines) if e["kind"] == "evaluation" and e["step"] == 0)
student = figures["student"]["accuracy"][0]  # [value, lower, upper]
others = {
    "its layers, untrained": figures["the same layers, untrained"]["accuracy"][0],
    "random weights": first["accuracy"],
}
print(f"the demo's student: {student:.3f};", *(f"{k}: {v:.3f}" for k, v in others.items()))
if not student >= 0.3:
    sys.exit("the demo's student guesses below 30 % of masked tokens")
for name, accuracy in others.items():
    if not student >= accuracy + 0.2:
        sys.exit(f"the demo's student is not 20 points ahead of {name}")
