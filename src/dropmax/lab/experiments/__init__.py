"""Experiments: the paper's Table 1 and studies of variants, planned, run on many processes or machines, tabulated."""

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
