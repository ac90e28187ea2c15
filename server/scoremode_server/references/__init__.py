"""References: recordings of a model's distributions over a text, and KL divergence from them. `files` is on disk,
`worker` in the engine's workers, the rest in API servers.
"""
