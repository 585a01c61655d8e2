"""Experiments: the paper's Table 1 and studies of variants, planned, run on many processes or machines, tabulated.

How ``dropmax reproduce`` turns a study into a table, in the order of the work:

1. ``study`` and ``plan`` decide every run before the first one starts.
2. ``reproduce`` does what is missing and shows how far it is: ``schedule`` hands out jobs, grids first; ``engines``
   sends them to processes or to a cluster; ``worker`` trains and measures one.
3. ``store`` appends each result to ``results.jsonl``; ``records`` says what a line holds.
4. ``tables`` computes means, intervals and comparisons beside the numbers of ``paper``; ``render`` writes them;
   ``compare`` and ``pictures`` show two variants, or a whole study.
"""

from __future__ import annotations

from dropmax.lab.experiments.engines import Cluster, Local
from dropmax.lab.experiments.plan import Group, Job, Plan, plan_table
from dropmax.lab.experiments.records import RunRecord
from dropmax.lab.experiments.reproduce import Outcome, reproduce
from dropmax.lab.experiments.schedule import tuned_from
from dropmax.lab.experiments.store import Store
from dropmax.lab.experiments.study import plan_study, study_names
from dropmax.lab.experiments.tables import Cell, Table, make_table, write_tables
from dropmax.lab.statistics import holm

__all__ = [
    "Cell",
    "Cluster",
    "Group",
    "Job",
    "Local",
    "Outcome",
    "Plan",
    "RunRecord",
    "Store",
    "Table",
    "holm",
    "make_table",
    "plan_study",
    "plan_table",
    "reproduce",
    "study_names",
    "tuned_from",
    "write_tables",
]
