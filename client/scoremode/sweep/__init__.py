"""Models one after another: each is served, measured on one text, compared with the first, and compared at the end.

It needs the extra `report`. Measuring is in `sweep`, whose imports take a second.
"""

from scoremode.sweep.plan import PlanError, SweepPlan, checked_plan, read_plan

__all__ = ["PlanError", "SweepPlan", "checked_plan", "read_plan"]
