"""Models one after another: each is served, measured on one text, compared with the first, and compared at the end.

It needs the extra `report`.
"""

from scoremode.sweep.plan import PlanError, SweepPlan, checked_plan, read_plan
from scoremode.sweep.sweep import SweepResult, compare_runs, run_sweep

__all__ = ["PlanError", "SweepPlan", "SweepResult", "checked_plan", "compare_runs", "read_plan", "run_sweep"]
