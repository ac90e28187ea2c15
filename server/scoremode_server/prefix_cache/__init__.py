"""vLLM's engine for scoring requests: a queue (`admission`), rows of shared prefixes (`store`, `request`), and the
only calls of vLLM's `generate` (`run`). `engine` is what other packages use.
"""
