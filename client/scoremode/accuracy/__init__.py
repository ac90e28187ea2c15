"""Accuracies on tasks: lm-eval's answers to the same questions, compared."""
