"""Token sequences, texts and windows to scores; limits of what is served. No HTTP.

`api`, `app`, `completions` and `offline` import from here.
"""
