"""Accuracies on tasks: lm-eval's answers to the same questions, compared."""

from scoremode.accuracy.compare_tasks import compare_tasks
from scoremode.accuracy.samples import load_tasks

__all__ = ["compare_tasks", "load_tasks"]
