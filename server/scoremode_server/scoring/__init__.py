"""The routes for scores and perplexity of given text, and how texts and conversations become sequences of tokens."""
