"""References in an engine worker, which records and compares rows, holds the LM head to compare with, and obeys orders
of API servers."""
