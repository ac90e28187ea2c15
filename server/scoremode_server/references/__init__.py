"""References record a model's distributions over a text, and KL divergence is measured from them. `files` reads and
writes them on disk, `worker` runs in the engine's workers, the rest in API servers.
"""
