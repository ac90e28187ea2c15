"""Serves the models of a plan one after another, measures each on one text, and compares them.

Needs the extra `report`. `sweep.sweep` does the work; it is not imported here, because its imports take a second.
"""

from scoremode.sweep.plan import PlanError, SweepPlan, checked_plan, read_plan

__all__ = ["PlanError", "SweepPlan", "checked_plan", "read_plan"]
