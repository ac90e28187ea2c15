"""vLLM's engine for scoring requests: a queue (`admission`), rows of shared prefixes (`store`, `cached_request`), and
the only calls of vLLM's `generate` (`passes`). `engine` is what other packages use.
"""
