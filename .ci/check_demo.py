"""Check the demo's result: its student has learned, far more than its layers knew before."""

import json
import sys
from pathlib import Path

figures = json.loads((Path(sys.argv[1]) / "scores" / "figures.json").read_bytes())["figures"]
student, int8 = (figures[name]["accuracy"]["value"] for name in ("student", "model_quantized.onnx"))
others = {
    name: figures[name]["accuracy"]["value"] for name in ("the same layers, untrained", "guessing")
}
print(f"the demo's student: {student:.3f}, in int8 {int8:.3f};", others)
if not student >= 0.3:
    sys.exit("the demo's student guesses below 30 % of masked tokens")
if not int8 >= student - 0.01:
    sys.exit("the demo's int8 file guesses a point less than its student")
for name, accuracy in others.items():
    if not student >= accuracy + 0.2:
        sys.exit(f"the demo's student is not 20 points ahead of {name}")
