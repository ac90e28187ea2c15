"""Scoring without HTTP: texts, sequences, windows, references, limits and the model's identity."""
