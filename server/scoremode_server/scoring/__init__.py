"""Scores and perplexity of given text: the routes, and the way from texts and conversations to sequences of tokens."""
