"""Which rows of a study differ over several data sets? ``python -m benchmarks.critical_difference STUDY... --out PNG``.

Each STUDY is a directory of ``dropmax reproduce`` with the same variants. Their means over the seeds are ranked on
every data set; a bar joins methods whose mean ranks differ by less than Nemenyi's critical difference.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from dropmax.lab.experiments import Store, pictures
from dropmax.workbench import style


def main() -> None:
    """Draw one diagram per metric."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("studies", nargs="+", type=Path)
    parser.add_argument("--metrics", default="error,nll_scaled,aurc")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    studies = [[run for run in Store(study).runs() if run.status == "done"] for study in arguments.studies]
    variants = dict.fromkeys(run.variant for run in studies[0])
    names = {name: f"**{name}**" if name.startswith("dropmax") else name for name in variants}
    style.save(pictures.ranks(studies, arguments.metrics.split(","), names), arguments.out)


if __name__ == "__main__":
    main()
