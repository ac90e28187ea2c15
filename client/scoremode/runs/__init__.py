"""Runs over the windows of a text: perplexity, KL divergence and recording, their journals and results."""
