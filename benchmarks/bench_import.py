"""What importing the core costs beyond importing torch: at most 5 % is the aim.

Each import runs in a Python of its own. The two take turns, and processor time is measured inside the process.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from typing import Any

_MEASURE = "import time; start = time.process_time(); {}; print(time.process_time() - start)"
_IMPORTS = {
    "torch": "import torch",
    "torch and dropmax": "import torch; from dropmax import Classifier, DropMax, exact, functional",
}
AIM = 1.05


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Measure both imports in turn; the ratio is the median over the rounds."""
    times: dict[str, list[float]] = {name: [] for name in _IMPORTS}
    for _ in range(3 if quick else 21):
        for name, code in _IMPORTS.items():
            done = subprocess.run(
                [sys.executable, "-c", _MEASURE.format(code)], check=True, capture_output=True, text=True
            )
            times[name].append(float(done.stdout))
    base, ours = times.values()
    ratios = [b / a for a, b in zip(base, ours, strict=True)]
    ratio = statistics.median(ratios)
    seconds = {name: statistics.median(found) for name, found in times.items()}
    return [
        {"what": "import of torch and dropmax / of torch", "aim": AIM, "met": ratio <= AIM, "ratio": ratio, **seconds}
    ]
