"""Serves the models of a plan, measures one after another on one text, and compares them.

The package needs the extra `report`. `scoremode.sweep.sweep` does the work; this file does not import it, because its
imports take a second.
"""

from scoremode.sweep.plan import PlanError, SweepPlan, checked_plan, read_plan

__all__ = ["PlanError", "SweepPlan", "checked_plan", "read_plan"]
