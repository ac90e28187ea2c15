"""Feeds scoring requests to vLLM's engine. Read `sequence` first: it has the types. `admission` is the queue, `store`
and `cached_request` reuse rows of shared prefixes, and `passes` calls vLLM's `generate`."""
