"""Compares accuracies on tasks, from lm-eval's answers to the same questions."""

from scoremode.accuracy.compare_tasks import compare_tasks
from scoremode.accuracy.samples import load_tasks

__all__ = ["compare_tasks", "load_tasks"]
