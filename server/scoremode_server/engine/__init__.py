"""vLLM's engine for scoring requests: the types (`sequence`, to read first), a queue (`admission`), rows of shared
prefixes (`store`, `cached_request`), and the only calls of vLLM's `generate` (`passes`). Other packages call
`engine`."""
