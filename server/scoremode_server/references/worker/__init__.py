"""References in an engine worker: recorded and compared rows, the LM head to compare with, and orders for both."""
